/// Calls that other processes must agree to before they are made: see `sluice_agreed_call`.
#pragma once

#include <cstdint>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/gate_api.h"

namespace sluice::gate {

/// As `sluice_gate_api` says of it.
[[nodiscard]] int make_agreed(sluice_agreed_call const& call) noexcept;
/// A moment, shorter when the waiting has begun only lately.
void wait_for_others(std::int64_t since) noexcept;

/// Asks, and makes the call when all have agreed. The thread stays inside the gate meanwhile, so that
/// whoever closes it knows whether the call will be made yet; it goes on with `something_else`, which
/// says whether it found anything to do. False if the thread had to leave, and the question was taken
/// back.
template <typename SomethingElse>
[[nodiscard]] bool make_if_agreed(thread_slot& self, planned_work const& work,
                                  sluice_agreed_call const& call, SomethingElse something_else) {
  gate& at = the_gate();
  if (at.enter(self, work) != CUDA_SUCCESS) {
    return false;
  }
  call.ask(call.of);
  for (std::int64_t const since = monotonic_ns(); call.is_agreed(call.of) == 0;) {
    if (at.wants_out(self)) {
      if (call.withdraw(call.of) != 0) {
        break;
      }
      at.leave(self);
      return false;
    }
    if (!something_else()) {
      wait_for_others(since);
    }
  }
  call.make(call.of);
  at.leave(self);
  return true;
}

}  // namespace sluice::gate
