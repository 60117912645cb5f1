/// Pauses of this process's launches at random instants, and what each of them took. Loaded by the
/// job that pause.py measures, under `sluice run`: the gate is the preloaded one.
///
/// A pause is what a handover's is: the gate is closed, everything that the device was given is
/// waited for, the gate is opened. Its *excess* is what lies after the end of the kernel, copy or
/// graph that was executing as the gate was closed: the part that software can do something about.
///
/// The ranks of a job can do that together. The first names an instant in memory that all share, at
/// which every one, or one of them, begins; none goes on before all are at rest. The pause is then
/// what the last of them takes.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <stop_token>
#include <thread>
#include <vector>

#include "abi/gate_api.h"

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

/// A pause that begins at that instant, up to `open`; nothing if the device did not come to rest
/// within two seconds.
std::optional<pause> come_to_rest(std::int64_t begun) {
  std::int64_t const deadline = begun + std::chrono::nanoseconds{2s}.count();
  if (gate()->close(deadline) != 0) {
    return std::nullopt;
  }
  bool const idle = gate()->wait_idle(deadline) == 0;
  std::int64_t const ended = now_ns();
  std::int64_t const unit = gate()->unit_ended();
  if (!idle) {
    gate()->open();
    return std::nullopt;
  }
  return pause{ended - begun, ended - std::max(begun, std::min(unit, ended))};
}

/// Runs of pauses between `start` and `stop`, one after the other.
struct pauser {
  std::vector<pause> pauses;
  std::uint64_t stuck = 0;  ///< that did not come to rest
  std::jthread thread;
};
std::unique_ptr<pauser> running;  // NOLINT: between start and stop, which one thread calls

void pause_alone(pauser& self) {
  if (auto const made = come_to_rest(now_ns())) {
    gate()->open();
    self.pauses.push_back(*made);
  } else {
    ++self.stuck;
  }
}

constexpr int most_ranks = 16;
constexpr int everyone = -1;

/// Lies in a file; all zero at first. The first rank writes what is not a rank's own.
struct shared_instants {
  std::atomic<std::uint64_t> named;     ///< how many pauses have been
  std::atomic<std::uint64_t> over;      ///< runs of them that have ended
  std::atomic<std::int64_t> begin_ns;   ///< of the last
  std::atomic<int> who;                 ///< pauses in it: a rank, or `everyone`
  std::atomic<std::uint64_t> finished;  ///< by all ranks together
  struct of_rank {
    std::atomic<std::int64_t> took_ns;  ///< less than zero: it did not come to rest
    std::atomic<std::int64_t> excess_ns;
  };
  std::array<of_rank, most_ranks> ranks;
};

/// This process's place among the ranks.
struct membership {
  shared_instants* shared = nullptr;
  int rank = 0;
  int ranks = 1;
  std::uint64_t seen = 0;  ///< pauses
  std::uint64_t runs = 0;
};
membership place;  // NOLINT: as `running`

/// What this rank does in the pause that has been named last.
void take_part() {
  auto& shared = *place.shared;
  place.seen = shared.named.load(std::memory_order_acquire);
  int const who = shared.who.load(std::memory_order_relaxed);
  std::int64_t const begin = shared.begin_ns.load(std::memory_order_relaxed);
  auto& own = shared.ranks.at(static_cast<std::size_t>(place.rank));
  bool rests = false;
  own.took_ns.store(0, std::memory_order_relaxed);
  own.excess_ns.store(0, std::memory_order_relaxed);
  if (who == everyone || who == place.rank) {
    while (now_ns() < begin) {
    }
    auto const made = come_to_rest(begin);
    rests = made.has_value();
    own.took_ns.store(rests ? made->took_ns : -1, std::memory_order_relaxed);
    own.excess_ns.store(rests ? made->excess_ns : 0, std::memory_order_relaxed);
  }
  shared.finished.fetch_add(1, std::memory_order_acq_rel);
  auto const all = place.seen * static_cast<std::uint64_t>(place.ranks);
  while (shared.finished.load(std::memory_order_acquire) < all) {
    std::this_thread::yield();
  }
  if (rests) {
    gate()->open();
  }
}

void lead(pauser& self, int who) {
  // Time for the others to see it.
  place.shared->who.store(who, std::memory_order_relaxed);
  place.shared->begin_ns.store(now_ns() + std::chrono::nanoseconds{1ms}.count(),
                               std::memory_order_relaxed);
  place.shared->named.fetch_add(1, std::memory_order_acq_rel);
  take_part();
  pause longest{};
  for (int rank = 0; rank < place.ranks; ++rank) {
    auto const& one = place.shared->ranks.at(static_cast<std::size_t>(rank));
    std::int64_t const took = one.took_ns.load(std::memory_order_relaxed);
    if (took < 0) {
      ++self.stuck;
      return;
    }
    longest.took_ns = std::max(longest.took_ns, took);
    longest.excess_ns = std::max(longest.excess_ns, one.excess_ns.load(std::memory_order_relaxed));
  }
  self.pauses.push_back(longest);
}

void follow() {
  auto const& shared = *place.shared;
  for (;;) {
    if (shared.named.load(std::memory_order_acquire) > place.seen) {
      take_part();
    } else if (shared.over.load(std::memory_order_acquire) >= place.runs) {
      return;
    } else {
      std::this_thread::sleep_for(50us);
    }
  }
}

}  // namespace

extern "C" {

/// 1 if this process has a gate.
[[gnu::visibility("default")]] int sluice_bench_has_gate() {
  return gate() != nullptr ? 1 : 0;
}

/// Bounds run-ahead to so many microseconds (0: no bound), with calls deferred or not.
[[gnu::visibility("default")]] void sluice_bench_bound(int deferred, std::int64_t microseconds) {
  if (auto const* const others = gate()->agreement(); others != nullptr) {
    others->may_pause(microseconds > 0 ? 1 : 0);
  }
  gate()->set_run_ahead(0);
  gate()->set_deferred(deferred);
  gate()->set_run_ahead(microseconds * 1000);
}

/// From now on pauses are those of that rank of so many, who share that file. Returns 0, or errno.
[[gnu::visibility("default")]] int sluice_bench_share(char const* path, int rank, int ranks) {
  int const file = ::open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ranks > most_ranks || ::ftruncate(file, sizeof(shared_instants)) != 0) {
    return ranks > most_ranks ? EINVAL : errno;
  }
  void* const at =
      ::mmap(nullptr, sizeof(shared_instants), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (at == MAP_FAILED) {
    return errno;
  }
  place.shared = static_cast<shared_instants*>(at);
  place.rank = rank;
  place.ranks = ranks;
  return 0;
}

/// From now on pauses, with gaps between the two lengths. Meanwhile every unit that matters has events
/// around it: pauses are not shorter for that, and windows without them do not pay for it. Where ranks
/// pause together, all of them call it; each pause is then everyone's, or one rank's, as the first says.
[[gnu::visibility("default")]] void sluice_bench_start_pausing(unsigned seed,
                                                               std::int64_t shortest_us,
                                                               std::int64_t longest_us,
                                                               int one_rank_each) {
  gate()->mark_units(std::chrono::nanoseconds{20us}.count());
  running = std::make_unique<pauser>();
  ++place.runs;
  running->thread = std::jthread{[=, &self = *running](std::stop_token const& stop) {
    gate()->exempt_thread(1);
    if (place.rank > 0) {
      follow();
      return;
    }
    std::minstd_rand random{seed};
    std::uniform_int_distribution<std::int64_t> gap{shortest_us, longest_us};
    std::uniform_int_distribution<int> any_rank{0, place.ranks - 1};
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::microseconds{gap(random)});
      if (place.shared == nullptr) {
        pause_alone(self);
      } else {
        lead(self, one_rank_each != 0 ? any_rank(random) : everyone);
      }
    }
    if (place.shared != nullptr) {
      place.shared->over.store(place.runs, std::memory_order_release);
    }
  }};
}

/// Ends that, and writes what up to `room` pauses took, their excess, and how many others did not come
/// to rest within two seconds. Returns how many there were.
[[gnu::visibility("default")]] std::size_t sluice_bench_stop_pausing(std::int64_t* took_ns,
                                                                     std::int64_t* excess_ns,
                                                                     std::size_t room,
                                                                     std::uint64_t* stuck) {
  running->thread.request_stop();
  running->thread.join();
  gate()->mark_units(0);
  std::size_t const count = std::min(room, running->pauses.size());
  for (std::size_t i = 0; i < count; ++i) {
    took_ns[i] = running->pauses[i].took_ns;
    excess_ns[i] = running->pauses[i].excess_ns;
  }
  *stuck = running->stuck;
  running.reset();
  return count;
}

}  // extern "C"
