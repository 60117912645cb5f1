/// Calls that other processes must agree to before they are made: see `sluice_agreed_call`.
#pragma once

#include <cstdint>

#include "abi/gate_api.h"
#include "runtime/gate/dispatch.hpp"

namespace sluice::gate {

/// As `sluice_gate_api` says of them.
[[nodiscard]] sluice_agreed_result make_agreed(sluice_agreed_call const& call) noexcept;
[[nodiscard]] sluice_agreed_result make_agreed_now(sluice_agreed_call const& call) noexcept;
[[nodiscard]] int enter_at_once() noexcept;
void leave() noexcept;
void set_agreement(sluice_agreement const* offered) noexcept;
[[nodiscard]] sluice_agreement const* agreement() noexcept;
/// A moment, shorter when the waiting has begun only lately.
void wait_for_others(std::int64_t since) noexcept;

/// The others have dropped the micro-batch that was running when so many aborts had ended: what it goes on to launch
/// is dropped here, too.
void drop_micro_batch(std::uint64_t aborts) noexcept;

enum class agreed_end {
  made,
  dropped,    ///< it belonged to a micro-batch that was
  taken_back  ///< the thread had to leave the gate, or has given up: ask again
};

/// Asks, and makes the call when all have agreed. The thread stays inside the gate meanwhile, so that
/// whoever closes it knows whether the call will be made yet; it goes on with `something_else`, which
/// says whether it found anything to do. `is_dropped` says whether this process has dropped the call,
/// which what has been agreed to is not; `gives_up` whether the thread is not to wait any longer.
template <typename IsDropped, typename GivesUp, typename SomethingElse>
[[nodiscard]] agreed_end make_if_agreed(thread_slot& self, planned_work const& work,
                                        sluice_agreed_call const& call, IsDropped is_dropped,
                                        GivesUp gives_up, SomethingElse something_else) {
  gate& at = the_gate();
  bool const refused = at.enter(self, work) != CUDA_SUCCESS;
  // Read before it is known that none has ended since the call.
  std::uint64_t const aborts = at.aborts();
  if (refused || is_dropped()) {
    if (!refused) {
      at.leave(self);
    }
    call.drop(call.of);
    return agreed_end::dropped;
  }
  call.ask(call.of);
  int agreed = call.is_agreed(call.of);
  // What is agreed on at once, most calls, is not to wait for the clock.
  for (std::int64_t const since = agreed == 0 ? monotonic_ns() : 0; agreed == 0;
       agreed = call.is_agreed(call.of)) {
    if (is_dropped() || at.wants_out(self) || gives_up()) {
      if (call.withdraw(call.of) != 0) {
        break;
      }
      at.leave(self);
      return agreed_end::taken_back;  // what is dropped is found to be when it is asked again
    }
    if (!something_else()) {
      wait_for_others(since);
    }
  }
  if (agreed == 2) {
    at.leave(self);
    drop_micro_batch(aborts);
    call.drop(call.of);
    return agreed_end::dropped;
  }
  call.make(call.of);
  at.leave(self);
  return agreed_end::made;
}

}  // namespace sluice::gate
