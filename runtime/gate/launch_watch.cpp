#include "runtime/gate/launch_watch.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "runtime/gate/futex.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/own_thread.hpp"
#include "runtime/gate/self_test.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Between two looks: the longer the device has worked, the less a late look costs.
constexpr std::chrono::nanoseconds shortest_look = 200us;
constexpr std::chrono::nanoseconds longest_look = 1ms;
constexpr int looks_in_a_burst = 32;
constexpr std::chrono::nanoseconds longest_sleep = 1s;

bool anybody_is_inside() noexcept {
  for (thread_slot const* slot = first_slot(); slot != nullptr; slot = slot->next) {
    if (slot->inside.load(std::memory_order_seq_cst) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

constinit launch_watch process_launch_watch;

bool launch_watch::start(sluice_launch_watcher const& watcher) {
  the_gate().prepare();
  if (auto const past = way_past_the_gate()) {
    std::fprintf(stderr,
                 "sluice: launches cannot be watched, since they would go past the gate: %s\n",
                 past->c_str());
    return false;
  }
  std::lock_guard const guard{mutex_};
  if (started_ || the_gate().inert()) {
    return false;
  }
  if (!start_own_thread<&launch_watch::run>(thread_, "sluice-watch", *this)) {
    std::fputs("sluice: launches cannot be watched: there can be no more threads\n", stderr);
    return false;
  }
  watcher_ = watcher;
  started_ = true;
  // From now on what waits for the device comes by.
  sluice_gate_defers.fetch_or(2, std::memory_order_release);
  the_gate().set_resting(true);
  return true;
}

void launch_watch::something_begins() noexcept {
  std::lock_guard const guard{mutex_};
  if (!the_gate().resting()) {
    return;  // another one was first
  }
  watcher_.begins(watcher_.of);
  works_.store(1, std::memory_order_release);
  the_gate().set_resting(false);
  futex_wake(works_);
}

void launch_watch::look(bool waited) noexcept {
  std::unique_lock const guard{mutex_, std::try_to_lock};
  if (!guard.owns_lock() || works_.load(std::memory_order_relaxed) == 0 || the_gate().inert()) {
    return;
  }
  std::uint64_t const launches = all_launches();
  if (!streams().are_idle()) {
    return;
  }
  the_gate().set_resting(true);
  // Threads that come now wait for the lock.
  if (anybody_is_inside() || all_launches() != launches) {
    the_gate().set_resting(false);
    return;
  }
  streams().are_clean();
  works_.store(0, std::memory_order_relaxed);
  watcher_.drained(watcher_.of, waited ? 1 : 0);
}

void launch_watch::run() noexcept {
  for (;;) {
    while (works_.load(std::memory_order_acquire) == 0) {
      static_cast<void>(futex_wait(works_, 0, longest_sleep));
    }
    std::int64_t const begun = monotonic_ns();
    std::uint64_t seen = all_launches();
    while (works_.load(std::memory_order_acquire) != 0) {
      std::chrono::nanoseconds const age{monotonic_ns() - begun};
      timespec const nap =
          to_timespec(std::clamp(age / looks_in_a_burst, shortest_look, longest_look));
      ::nanosleep(&nap, nullptr);
      if (std::uint64_t const now = all_launches(); now != seen) {
        seen = now;
      } else {
        own_work const work;
        look(false);
      }
    }
  }
}

}  // namespace sluice::gate
