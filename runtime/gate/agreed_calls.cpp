#include "runtime/gate/agreed_calls.hpp"

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <ctime>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/futex.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Ranks come to the same collective within a few milliseconds, and the device runs empty meanwhile.
constexpr std::chrono::nanoseconds awake_for_others = 3ms;
/// Later it is looked so often; a pause may have to wait as long.
constexpr std::chrono::nanoseconds nap_for_others = 50us;
/// At first without the kernel: ranks that do the same come to it at the same time.
constexpr std::chrono::nanoseconds spun_for_others = 5us;

constinit std::atomic<sluice_agreement const*> the_agreement{nullptr};

template <typename GivesUp>
agreed_end ask_and_make(thread_slot& self, sluice_agreed_call const& call, GivesUp gives_up) {
  planned_work const work{{static_cast<CUstream>(call.stream), false}, any_kind};
  return make_if_agreed(
      self, work, call, [] { return false; }, gives_up, [] { return false; });
}

sluice_agreed_result result_of(agreed_end became) noexcept {
  return became == agreed_end::made ? SLUICE_AGREED_MADE : SLUICE_AGREED_DROPPED;
}

/// Leaves it to the submitter, which takes calls behind it from then on. False if none takes it.
bool leave_to(submission_queue& queue, thread_slot const& self, sluice_agreed_call const& call) {
  gate::leaver const here{the_gate()};
  return (the_gate().deferring() && queue.push_agreed(self, call)) ||
         (the_gate().defer_for_others() && queue.push_agreed(self, call));
}

}  // namespace

void wait_for_others(std::int64_t since) noexcept {
  std::int64_t const waited = monotonic_ns() - since;
  if (waited < spun_for_others.count()) {
    _mm_pause();
    return;
  }
  if (waited < awake_for_others.count()) {
    ::sched_yield();
    return;
  }
  timespec const limit = to_timespec(nap_for_others);
  ::nanosleep(&limit, nullptr);
}

sluice_agreed_result make_agreed(sluice_agreed_call const& call) noexcept {
  thread_slot& self = this_thread();
  if (!takes_part(self)) {
    call.make(call.of);
    return SLUICE_AGREED_MADE;
  }
  if (self.expendable && call.drop == nullptr) {
    return SLUICE_AGREED_REFUSED;
  }
  bool const leaves = the_gate().deferring() || the_gate().defers();
  submission_queue* const queue =
      leaves ? queue_for({static_cast<CUstream>(call.stream), false}) : nullptr;
  if (queue == nullptr) {
    return make_agreed_now(call);
  }
  if (!the_gate().deferring()) {
    // The last of the ranks, for which the others' devices wait, makes it at once.
    std::int64_t const give_up_at = monotonic_ns() + spun_for_others.count();
    auto const became =
        ask_and_make(self, call, [give_up_at] { return monotonic_ns() > give_up_at; });
    if (became != agreed_end::taken_back) {
      return result_of(became);
    }
  }
  return leave_to(*queue, self, call) ? SLUICE_AGREED_LEFT : make_agreed_now(call);
}

sluice_agreed_result make_agreed_now(sluice_agreed_call const& call) noexcept {
  flush_if_deferring(std::nullopt);
  for (;;) {
    auto const became = ask_and_make(this_thread(), call, [] { return false; });
    if (became != agreed_end::taken_back) {
      return result_of(became);
    }
  }
}

[[gnu::hot]] int enter_at_once() noexcept {
  thread_slot& self = this_thread();
  bool const has_to_wait_for_nothing =
      takes_part(self) && !self.expendable && self.commit == 0 && !captures_are_under_way();
  return has_to_wait_for_nothing && the_gate().enter_if_it_holds_nobody(self) ? 1 : 0;
}

[[gnu::hot]] void leave() noexcept {
  the_gate().leave(this_thread());
}

void drop_micro_batch(std::uint64_t aborts) noexcept {
  auto const is_running = [](void const* which) {
    return the_gate().aborts() == *static_cast<std::uint64_t const*>(which) ? 1 : 0;
  };
  if (auto const* const runtime = sharing_runtime(); runtime != nullptr) {
    runtime->micro_batch_dropped(is_running, &aborts);
  }
}

void set_agreement(sluice_agreement const* offered) noexcept {
  the_agreement.store(offered, std::memory_order_release);
}

sluice_agreement const* agreement() noexcept {
  return the_agreement.load(std::memory_order_acquire);
}

}  // namespace sluice::gate
