/// Pauses of this process's launches at random instants, and what each of them took. Loaded by the
/// job that pause.py measures, under `sluice run`: the gate is the preloaded one.
///
/// A pause is what a handover's is: the gate is closed, everything that the device was given is
/// waited for, the gate is opened. Its *excess* is what lies after the end of the kernel, copy or
/// graph that was executing as the gate was closed: the part that software can do something about.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <stop_token>
#include <thread>
#include <vector>

#include "runtime/gate/gate_api.h"

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as the gate's

struct pause {
  std::int64_t took_ns;
  std::int64_t excess_ns;
};

sluice_gate_api const* gate() {
  static auto const ask =
      reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
  return ask != nullptr ? ask() : nullptr;
}

std::int64_t now_ns() {
  return clock::now().time_since_epoch() / 1ns;
}

/// Nothing if the device did not come to rest within two seconds.
void pause_once(std::vector<pause>& all) {
  std::int64_t const begun = now_ns();
  std::int64_t const deadline = begun + std::chrono::nanoseconds{2s}.count();
  if (gate()->close(deadline) != 0) {
    return;
  }
  bool const idle = gate()->wait_idle(deadline) == 0;
  std::int64_t const ended = now_ns();
  std::int64_t const unit = gate()->unit_ended();
  gate()->open();
  if (idle) {
    all.push_back({ended - begun, ended - std::max(begun, std::min(unit, ended))});
  }
}

struct pauser {
  std::vector<pause> pauses;
  std::jthread thread;
};
std::unique_ptr<pauser> running;  // NOLINT: between start and stop, which one thread calls

}  // namespace

extern "C" {

/// 1 if this process has a gate.
[[gnu::visibility("default")]] int sluice_bench_has_gate() {
  return gate() != nullptr ? 1 : 0;
}

/// Bounds run-ahead to so many microseconds (0: no bound), with calls deferred or not.
[[gnu::visibility("default")]] void sluice_bench_bound(int deferred, std::int64_t microseconds) {
  gate()->set_run_ahead(0);
  gate()->set_deferred(deferred);
  gate()->set_run_ahead(microseconds * 1000);
}

/// From now on pauses, with gaps between the two lengths. Meanwhile every unit that matters has events
/// around it: pauses are not shorter for that, and windows without them do not pay for it.
[[gnu::visibility("default")]] void sluice_bench_start_pausing(unsigned seed,
                                                               std::int64_t shortest_us,
                                                               std::int64_t longest_us) {
  gate()->mark_units(std::chrono::nanoseconds{20us}.count());
  running = std::make_unique<pauser>();
  running->thread = std::jthread{[=, &all = running->pauses](std::stop_token const& stop) {
    gate()->exempt_thread(1);
    std::minstd_rand random{seed};
    std::uniform_int_distribution<std::int64_t> gap{shortest_us, longest_us};
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::microseconds{gap(random)});
      pause_once(all);
    }
  }};
}

/// Ends that, and writes what up to `room` pauses took, and their excess. Returns how many there were.
[[gnu::visibility("default")]] std::size_t sluice_bench_stop_pausing(std::int64_t* took_ns,
                                                                     std::int64_t* excess_ns,
                                                                     std::size_t room) {
  running->thread.request_stop();
  running->thread.join();
  gate()->mark_units(0);
  std::size_t const count = std::min(room, running->pauses.size());
  for (std::size_t i = 0; i < count; ++i) {
    took_ns[i] = running->pauses[i].took_ns;
    excess_ns[i] = running->pauses[i].excess_ns;
  }
  running.reset();
  return count;
}

}  // extern "C"
