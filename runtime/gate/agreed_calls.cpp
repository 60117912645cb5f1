#include "runtime/gate/agreed_calls.hpp"

#include <sched.h>

#include <chrono>
#include <ctime>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/futex.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Ranks come to the same collective within a few milliseconds, and the device runs empty meanwhile.
constexpr std::chrono::nanoseconds awake_for_others = 3ms;
/// Later it is looked so often; a pause may have to wait as long.
constexpr std::chrono::nanoseconds nap_for_others = 50us;

/// Waits inside the gate, so that whoever closes it knows whether the call will be made yet. False if
/// the thread has to leave, and the question was taken back.
bool is_agreed(gate& at, thread_slot const& self, sluice_agreed_call const& call) {
  std::int64_t const since = monotonic_ns();
  while (call.is_agreed(call.of) == 0) {
    if (at.wants_out(self)) {
      return call.withdraw(call.of) != 0;
    }
    wait_for_others(since);
  }
  return true;
}

void make_in_turn(thread_slot& self, sluice_agreed_call const& call) {
  gate& at = the_gate();
  planned_work const work{{static_cast<CUstream>(call.stream), false}, any_kind};
  for (;;) {
    if (at.enter(self, work) != CUDA_SUCCESS) {
      continue;  // only expendable threads are refused
    }
    call.ask(call.of);
    if (is_agreed(at, self, call)) {
      call.make(call.of);
      at.leave(self);
      return;
    }
    at.leave(self);
  }
}

}  // namespace

void wait_for_others(std::int64_t since) noexcept {
  if (monotonic_ns() - since < awake_for_others.count()) {
    ::sched_yield();
    return;
  }
  timespec const limit = to_timespec(nap_for_others);
  ::nanosleep(&limit, nullptr);
}

int make_agreed(sluice_agreed_call const& call) noexcept {
  thread_slot& self = this_thread();
  gate& at = the_gate();
  if (!takes_part(self)) {
    call.make(call.of);
    return 1;
  }
  if (self.expendable) {
    return -1;
  }
  if (at.deferring()) {
    stream_use const where{static_cast<CUstream>(call.stream), false};
    submission_queue* const queue = queue_for(where);
    if (queue != nullptr && queue->push_agreed(self, call)) {
      return 0;
    }
    flush_submissions(std::nullopt);
  }
  make_in_turn(self, call);
  return 1;
}

}  // namespace sluice::gate
