#include "runtime/gate/agreed_calls.hpp"

#include <sched.h>

#include <chrono>
#include <ctime>

#include "runtime/gate/futex.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Ranks come to the same collective within a few milliseconds, and the device runs empty meanwhile.
constexpr std::chrono::nanoseconds awake_for_others = 3ms;
/// Later it is looked so often; a pause may have to wait as long.
constexpr std::chrono::nanoseconds nap_for_others = 50us;

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
  planned_work const work{{static_cast<CUstream>(call.stream), false}, any_kind};
  while (!make_if_agreed(self, work, call, [] { return false; })) {
  }
  return 1;
}

}  // namespace sluice::gate
