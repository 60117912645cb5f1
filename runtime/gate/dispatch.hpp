/// The one place where a gated call is submitted. Every wrapper ends here with what it is (symbol and
/// stream) and how to make the call: now, from this thread, or later, from the submitter
/// (submission.hpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/launch_watch.hpp"
#include "runtime/gate/queued_commit.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/submission.hpp"
#include "runtime/gate/submissions.hpp"
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
  stream_state* const state = at.inert() ? nullptr : streams().find(self, work.stream);
  if (state != nullptr) {
    bool const bounded = at.bounded() && !self.exempt;
    if (bounded || is_per_thread(work.stream)) {
      streams().launched(*state, work,
                         bounded ? at.run_ahead_bound() : std::chrono::nanoseconds::zero());
    }
    if (!state->dirty.load(std::memory_order_relaxed)) {
      state->dirty.store(true, std::memory_order_release);
    }
  }
  // At last: who sees it counted sees the stream dirty (launch_watch.cpp).
  self.launches.store(self.launches.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

/// Whether a thread's calls pass the gate. One made from inside another call belongs to that: holding
/// it would hold the outer call as well.
[[nodiscard]] inline bool takes_part(thread_slot const& self) noexcept {
  return !self.exempt && self.inside.load(std::memory_order_relaxed) == 0;
}

/// Waits until all calls that were left to a submitter have been made.
inline void flush_if_deferring(std::optional<symbol> cause) noexcept {
  if (the_gate().deferring()) [[unlikely]] {
    flush_submissions(cause);
  }
}

/// Waits until all that was launched before is done, as the driver does before it frees memory.
inline void wait_for_launches() noexcept {
  if (!the_gate().inert()) {
    flush_if_deferring(std::nullopt);
    static_cast<void>(streams().wait_idle(std::numeric_limits<std::int64_t>::max(), false));
  }
}

/// While it lives memory of the pool stays where it is: for a call that names it and puts nothing on the device. The driver
/// looks up addresses of its parameters, or of a graph's, and knows none without memory behind them.
class memory_stays {
 public:
  explicit memory_stays(symbol which) noexcept : enters_(takes_part(self_)) {
    if (enters_) {
      the_gate().enter_to_ask(self_, which);
    }
  }
  memory_stays(memory_stays const&) = delete;
  memory_stays& operator=(memory_stays const&) = delete;
  ~memory_stays() {
    if (enters_) {
      the_gate().leave(self_);
    }
  }

 private:
  thread_slot& self_ = this_thread();
  bool enters_;
};

/// Makes a gated call as the gate allows it, after all that lies in queues. `submit` calls the
/// driver.
template <typename Submit>
[[nodiscard]] CUresult dispatch(gated_call const& call, Submit&& submit) noexcept {
  thread_slot& self = this_thread();
  gate& at = the_gate();
  bool const taking_part = takes_part(self);
  if (taking_part && at.deferring()) [[unlikely]] {
    flush_submissions(call.which);
    if (CUresult const earlier = take_submission_error(); earlier != CUDA_SUCCESS) {
      return earlier;
    }
  }
  if (taking_part) {
    if (the_commit().is_dropped(self.commit)) [[unlikely]] {
      return call.droppable ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
    }
    if (CUresult const refused = at.enter(self, call.work); refused != CUDA_SUCCESS) {
      // Libraries such as cuBLAS and cuDNN remember a failed launch, and hold it against the next,
      // sound one: what an aborted micro-batch may leave undone succeeds without being done.
      return self.expendable && call.droppable ? CUDA_SUCCESS : refused;
    }
  }
  CUresult const result = submit();
  note_launch(at, self, call.work);
  if (taking_part) {
    at.leave(self);
    if (!call.droppable) {
      the_launch_watch().somebody_has_waited();
    }
  }
  return result;
}

/// Whether there are captures under way, in which calls become parts of a graph: they go straight.
[[nodiscard]] bool captures_are_under_way() noexcept;
/// A capture has begun on the stream, into a new graph or one that there was; or the stream is about to go.
void note_capture(stream_use where, bool into_new);
void forget_capture(CUstream stream);

/// The queue that may take a call on that stream; nullptr if the call has to be made by its thread.
[[nodiscard]] inline submission_queue* queue_for(stream_use where) {
  bool const may_wait = !is_per_thread(where) && !captures_are_under_way();
  return may_wait ? submissions_of_current_context() : nullptr;
}

/// Makes a call that may be left to the submitter: at once where nothing is before it, there is room,
/// the gate is open, and it is not for others that calls are left. `defer` pushes it onto a queue, and
/// says whether the queue has taken it.
template <typename Submit, typename Defer>
[[nodiscard]] CUresult dispatch_or_defer(gated_call const& call, kind_of_call kind, Submit&& submit,
                                         Defer&& defer) noexcept {
  thread_slot& self = this_thread();
  gate& at = the_gate();
  if (!at.deferring() || !takes_part(self)) [[likely]] {
    return dispatch(call, submit);
  }
  bool const aborted = self.expendable && at.aborting();
  if (call.droppable && (aborted || the_commit().is_dropped(self.commit))) {
    return CUDA_SUCCESS;  // dropped, and so are those before it
  }
  submission_queue* const queue = queue_for(call.work.stream);
  if (queue == nullptr || (self.commit != 0 && !the_commit().lies_in(queue))) {
    return dispatch(call, submit);
  }
  if (CUresult const earlier = queue->take_error(); earlier != CUDA_SUCCESS) {
    return earlier;
  }
  CUresult result = CUDA_SUCCESS;
  // Where nothing bounds run-ahead the device waits for what threads do: they leave it all.
  bool const straight = queue->is_empty() && !at.leaves_all();
  if (straight && call.droppable && the_commit().is_dropped(self.commit)) {
    return CUDA_SUCCESS;  // asked again: only with an empty queue the answer is final
  }
  if (straight && at.try_enter(self, call.work)) {
    result = submit();
    note_launch(at, self, call.work);
    at.leave(self);
  } else if (defer(*queue, self)) {
    return CUDA_SUCCESS;
  } else {
    result = dispatch(call, submit);
  }
  if (result == CUDA_SUCCESS && kind != any_kind) {
    queue->accept(kind);
  }
  return result;
}

}  // namespace sluice::gate
