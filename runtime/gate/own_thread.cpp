#include "runtime/gate/own_thread.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

#include "runtime/gate/futex.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/submissions.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Who ends a process is not kept waiting for longer by what hangs.
constexpr std::chrono::nanoseconds awaited_at_most = 1s;
constexpr std::chrono::nanoseconds look_again = 1ms;

constinit std::atomic<std::uint32_t> under_way{0};
constinit std::atomic<bool> process_ends{false};
constinit thread_local int depth = 0;

void stay_out_if_the_process_ends() noexcept {
  if (!process_ends.load(std::memory_order_seq_cst)) {
    return;
  }
  under_way.fetch_sub(depth > 0 ? 1 : 0, std::memory_order_seq_cst);
  for (;;) {
    ::pause();
  }
}

void leave_the_driver() noexcept {
  if (the_gate().inert()) {
    return;  // a forked child has none of these threads
  }
  flush_submissions_until(monotonic_ns() + awaited_at_most.count());
  process_ends.store(true, std::memory_order_seq_cst);
  std::int64_t const deadline = monotonic_ns() + awaited_at_most.count();
  while (under_way.load(std::memory_order_seq_cst) != 0 && monotonic_ns() < deadline) {
    timespec const moment = to_timespec(look_again);
    ::nanosleep(&moment, nullptr);
  }
  abandon_submissions();
}

}  // namespace

own_work::own_work() noexcept {
  if (depth++ == 0) {
    under_way.fetch_add(1, std::memory_order_seq_cst);
  }
  stay_out_if_the_process_ends();
}

own_work::~own_work() {
  if (--depth == 0) {
    under_way.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void own_work::go_on() noexcept {
  stay_out_if_the_process_ends();
}

void leave_driver_at_exit() noexcept {
  static std::atomic<bool> is_registered{false};
  if (!is_registered.exchange(true)) {
    static_cast<void>(std::atexit(leave_the_driver));
  }
}

}  // namespace sluice::gate
