/// The one place where a gated call is submitted. Every generated wrapper ends here with what it is
/// (symbol and stream) and how to make the call; a way of submitting that is not "now, from this
/// thread" goes in here and nowhere else.
#pragma once

#include <chrono>
#include <cstdint>
#include <type_traits>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/thread_slot.hpp"

/// Before the definition of a function that stands for the driver's.
#define SLUICE_DRIVER_CALL extern "C" __attribute__((visibility("default")))

namespace sluice::gate {

struct gated_call {
  symbol which;
  planned_work work;
  bool droppable;  ///< nobody on the host sees at once whether it was done
};

/// What goes into the kind of a call's work: handles and numbers, by value.
template <typename Part>
[[nodiscard]] std::uint64_t work_part(Part part) noexcept {
  if constexpr (std::is_pointer_v<Part>) {
    return reinterpret_cast<std::uintptr_t>(part);
  } else {
    return static_cast<std::uint64_t>(part);
  }
}
/// The dimensions of a launch that comes with a configuration.
[[nodiscard]] inline work_key work_part(CUlaunchConfig const* config) noexcept {
  return config == nullptr ? 0
                           : key_of_work({config->gridDimX, config->gridDimY, config->gridDimZ,
                                          config->blockDimX, config->blockDimY, config->blockDimZ});
}

/// What has to be known of a call that the driver has taken.
inline void note_launch(gate& at, thread_slot& self, planned_work const& work) {
  self.launches.store(self.launches.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (at.inert()) {
    return;
  }
  if (stream_state* state = streams().find(self, work.stream); state != nullptr) {
    bool const bounded = at.bounded() && !self.exempt;
    if (bounded || is_per_thread(work.stream)) {
      streams().launched(*state, work.kind,
                         bounded ? at.run_ahead_bound() : std::chrono::nanoseconds::zero());
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
    if (CUresult const refused = at.enter(self, call.work); refused != CUDA_SUCCESS) {
      // Libraries such as cuBLAS and cuDNN remember a failed launch, and hold it against the next,
      // sound one: what an aborted micro-batch may leave undone succeeds without being done.
      return self.expendable && call.droppable ? CUDA_SUCCESS : refused;
    }
  }
  CUresult const result = submit();
  note_launch(at, self, call.work);
  if (takes_part) {
    at.leave(self);
  }
  return result;
}

}  // namespace sluice::gate
