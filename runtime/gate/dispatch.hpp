/// The one place where a gated call is submitted. Every generated wrapper ends here with what it is
/// (symbol and stream) and how to make the call; a way of submitting that is not "now, from this
/// thread" goes in here and nowhere else.
#pragma once

#include "runtime/gate/driver.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/thread_slot.hpp"

/// Before the definition of a function that stands for the driver's.
#define SLUICE_DRIVER_CALL extern "C" __attribute__((visibility("default")))

namespace sluice::gate {

struct gated_call {
  symbol which;
  stream_use stream;
  bool droppable;  ///< nobody on the host sees at once whether it was done
};

/// What has to be known of a call that the driver has taken.
inline void note_launch(gate& at, thread_slot& self, stream_use stream) {
  self.launches.store(self.launches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (at.inert()) {
    return;
  }
  if (stream_state* state = streams().find(self, stream); state != nullptr) {
    bool const bounded = at.bounded() && !self.exempt;
    if (bounded || is_per_thread(stream)) {
      streams().launched(*state, bounded ? at.window() : window_bounds{});
    }
    if (!state->dirty.load(std::memory_order_relaxed)) {
      state->dirty.store(true, std::memory_order_release);
    }
  }
}

/// Makes a gated call as the gate allows it. `submit` calls the driver.
template <typename Submit>
[[nodiscard]] CUresult dispatch(gated_call const& call, Submit&& submit) noexcept {
  thread_slot& self = this_thread();
  gate& at = the_gate();
  // A call made from inside another one belongs to it: holding it would hold the outer call as
  // well.
  bool const takes_part = !self.exempt && self.inside.load(std::memory_order_relaxed) == 0;
  if (takes_part) {
    if (CUresult const refused = at.enter(self, call.stream); refused != CUDA_SUCCESS) {
      // Libraries such as cuBLAS and cuDNN remember a failed launch, and hold it against the next,
      // sound one: what an aborted micro-batch may leave undone succeeds without being done.
      return self.expendable && call.droppable ? CUDA_SUCCESS : refused;
    }
  }
  CUresult const result = submit();
  note_launch(at, self, call.stream);
  if (takes_part) {
    at.leave(self);
  }
  return result;
}

}  // namespace sluice::gate
