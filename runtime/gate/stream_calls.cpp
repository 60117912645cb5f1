/// Calls that order streams, ask them, or wait for them. Events are recorded and waited for in their
/// turn; what is asked is answered as if everything accepted were with the driver, which has not
/// done it yet.
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/gate/agreed_graphs.hpp"
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/launch_watch.hpp"

using namespace sluice::gate;

namespace {

bool queues_matter() {
  return the_gate().deferring() && takes_part(this_thread());
}

/// The queue that a call on that stream has to join; nullptr if it has to go straight, which it may
/// now.
submission_queue* queue_to_join(symbol which, stream_use where) {
  if (!queues_matter()) {
    return nullptr;
  }
  submission_queue* const queue = queue_for(where);
  if (queue == nullptr) {
    flush_submissions(which);
  }
  return queue != nullptr && queue->is_empty() ? nullptr : queue;
}

/// In its turn, what records an event or waits for one. `submit` has its parameters by value.
template <typename Submit>
CUresult in_turn(submission_queue* queue, stream_use where, CUevent event, bool records,
                 Submit const& submit) {
  if (queue != nullptr) {
    if (queue->push_event(this_thread(), where, event, records, submit)) {
      return CUDA_SUCCESS;
    }
    queue->flush();
  }
  return submit();
}

template <typename Submit>
CUresult record(symbol which, stream_use where, CUevent event, Submit const& submit) {
  return in_turn(queue_to_join(which, where), where, event, true, submit);
}

CUresult wait_for_event(stream_use where, CUevent event, unsigned flags, symbol which) {
  submission_queue* const queue = queue_to_join(which, where);
  if (queues_matter() && (queue == nullptr || !queue->uses_event(event))) {
    flush_record(event);  // it may lie in the queue of another context
  }
  return in_turn(queue, where, event, false, [=] {
    return real<CUresult (*)(CUstream, CUevent, unsigned)>(which)(where.handle, event, flags);
  });
}

/// After the calls that lie before it, a call that waits for the device: it tells what went wrong.
template <typename Wait>
CUresult wait_after_flush(Wait wait) {
  CUresult const earlier = take_submission_error();
  CUresult const result = wait();
  return result == CUDA_SUCCESS ? earlier : result;
}

/// In a process whose launches are watched, which leaves none to a submitter.
template <typename Wait>
CUresult wait_watched(Wait wait) {
  CUresult const result = wait();
  the_launch_watch().somebody_has_waited();
  return result;
}

CUresult synchronise_context(symbol which, CUcontext context) {
  auto const wait = [&] {
    return which == symbol::of_cuCtxSynchronize ? real<CUresult (*)()>(which)()
                                                : real<CUresult (*)(CUcontext)>(which)(context);
  };
  if (!queues_matter()) {
    return wait_watched(wait);
  }
  flush_submissions(which);
  return wait_after_flush(wait);
}

CUresult synchronise_stream(symbol which, stream_use where) {
  auto const wait = [&] { return real<CUresult (*)(CUstream)>(which)(where.handle); };
  if (!queues_matter()) {
    return wait_watched(wait);
  }
  flush_stream(where);
  return wait_after_flush(wait);
}

CUresult query_stream(symbol which, stream_use where) {
  if (queues_matter() && stream_is_pending(where)) {
    return CUDA_ERROR_NOT_READY;
  }
  return real<CUresult (*)(CUstream)>(which)(where.handle);
}

/// Behind the calls that name it. Python destroys events that a collective waits for as a matter of
/// course, and is not to wait for those. The driver gives the handle to nobody else before that.
CUresult destroy_event(symbol which, CUevent event) {
  auto const destroy = [=] { return real<CUresult (*)(CUevent)>(which)(event); };
  submission_queue* const queue = queues_matter() ? last_queue_that_uses(event) : nullptr;
  if (queue != nullptr) {
    if (queue->push_end_of(this_thread(), event, destroy)) {
      return CUDA_SUCCESS;
    }
    queue->flush_event(event);
  }
  return destroy();
}

CUresult elapsed_time(symbol which, float* milliseconds, CUevent from, CUevent to) {
  if (queues_matter() && (record_is_pending(from) || record_is_pending(to))) {
    return CUDA_ERROR_NOT_READY;
  }
  return real<CUresult (*)(float*, CUevent, CUevent)>(which)(milliseconds, from, to);
}

/// Captures by the stream that they have begun on, until they end there.
struct capture_set {
  std::mutex lock;
  std::multimap<CUstream, CUgraph> graphs;  // guarded by lock; by what the driver calls the graph
};
constinit std::atomic<std::size_t> captures{0};

capture_set& current_captures() {
  static capture_set& one = *std::make_unique<capture_set>().release();
  return one;
}

/// Takes a capture out; its graph, or nullptr. The per-thread stream may have several, of which `known` is
/// the one, if the driver still tells; it does not of one that is invalid.
CUgraph take_capture(CUstream stream, CUgraph known) {
  capture_set& all = current_captures();
  std::lock_guard const guard{all.lock};
  auto [found, end] = all.graphs.equal_range(stream);
  while (found != end && known != nullptr && found->second != known && std::next(found) != end) {
    ++found;
  }
  if (found == end) {
    return known;
  }
  CUgraph const graph = found->second;
  all.graphs.erase(found);
  captures.store(all.graphs.size(), std::memory_order_release);
  return graph;
}

CUresult end_capture(symbol which, stream_use where, CUgraph* graph) {
  CUgraph const known = captured_graph(where);
  CUresult const result = real<CUresult (*)(CUstream, CUgraph*)>(which)(where.handle, graph);
  if (result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {  // else it goes on
    CUgraph const captured = take_capture(driver::handle_of(where), known);
    capture_has_ended(captured, result == CUDA_SUCCESS ? *graph : nullptr);
  }
  return result;
}

}  // namespace

namespace sluice::gate {

bool captures_are_under_way() noexcept {
  return captures.load(std::memory_order_acquire) != 0;
}

void note_capture(stream_use where, bool into_new) {
  CUgraph const graph = captured_graph(where);
  if (into_new) {
    graph_is_new(graph);
  }
  capture_set& all = current_captures();
  std::lock_guard const guard{all.lock};
  all.graphs.emplace(driver::handle_of(where), graph);
  captures.store(all.graphs.size(), std::memory_order_release);
}

void forget_capture(CUstream stream) {
  if (captures_are_under_way()) {
    capture_has_ended(take_capture(stream, nullptr), nullptr);
  }
}

}  // namespace sluice::gate

/// Of a function that stands for the driver's while something may lie in queues; see generate.py.
#define SLUICE_ORDERED_CALL extern "C" __attribute__((visibility("hidden")))

#define SLUICE_STREAM_CALLS(suffix, per_thread)                                                    \
  SLUICE_ORDERED_CALL CUresult cuEventRecord##suffix##_in_turn(CUevent event, CUstream stream) {   \
    return record(symbol::of_cuEventRecord##suffix, {stream, per_thread}, event, [=] {             \
      return real<CUresult (*)(CUevent, CUstream)>(symbol::of_cuEventRecord##suffix)(event,        \
                                                                                     stream);      \
    });                                                                                            \
  }                                                                                                \
  SLUICE_ORDERED_CALL CUresult cuEventRecordWithFlags##suffix##_in_turn(                           \
      CUevent event, CUstream stream, unsigned flags) {                                            \
    return record(symbol::of_cuEventRecordWithFlags##suffix, {stream, per_thread}, event, [=] {    \
      using driver_function = CUresult (*)(CUevent, CUstream, unsigned);                           \
      return real<driver_function>(symbol::of_cuEventRecordWithFlags##suffix)(event, stream,       \
                                                                              flags);              \
    });                                                                                            \
  }                                                                                                \
  SLUICE_ORDERED_CALL CUresult cuStreamWaitEvent##suffix##_in_turn(CUstream stream, CUevent event, \
                                                                   unsigned flags) {               \
    return wait_for_event({stream, per_thread}, event, flags,                                      \
                          symbol::of_cuStreamWaitEvent##suffix);                                   \
  }                                                                                                \
  SLUICE_ORDERED_CALL CUresult cuStreamSynchronize##suffix##_in_turn(CUstream stream) {            \
    return synchronise_stream(symbol::of_cuStreamSynchronize##suffix, {stream, per_thread});       \
  }                                                                                                \
  SLUICE_ORDERED_CALL CUresult cuStreamQuery##suffix##_in_turn(CUstream stream) {                  \
    return query_stream(symbol::of_cuStreamQuery##suffix, {stream, per_thread});                   \
  }                                                                                                \
  SLUICE_DRIVER_CALL CUresult cuStreamEndCapture##suffix(CUstream stream, CUgraph* graph) {        \
    return end_capture(symbol::of_cuStreamEndCapture##suffix, {stream, per_thread}, graph);        \
  }

SLUICE_STREAM_CALLS(, false)
SLUICE_STREAM_CALLS(_ptsz, true)

SLUICE_ORDERED_CALL CUresult cuCtxSynchronize_in_turn() {
  return synchronise_context(symbol::of_cuCtxSynchronize, nullptr);
}
SLUICE_ORDERED_CALL CUresult cuCtxSynchronize_v2_in_turn(CUcontext context) {
  return synchronise_context(symbol::of_cuCtxSynchronize_v2, context);
}
SLUICE_ORDERED_CALL CUresult cuEventQuery_in_turn(CUevent event) {
  if (queues_matter() && record_is_pending(event)) {
    return CUDA_ERROR_NOT_READY;
  }
  return real<CUresult (*)(CUevent)>(symbol::of_cuEventQuery)(event);
}
SLUICE_ORDERED_CALL CUresult cuEventSynchronize_in_turn(CUevent event) {
  auto const wait = [event] {
    return real<CUresult (*)(CUevent)>(symbol::of_cuEventSynchronize)(event);
  };
  if (!queues_matter()) {
    return wait_watched(wait);
  }
  flush_record(event);
  return wait_after_flush(wait);
}
SLUICE_ORDERED_CALL CUresult cuEventDestroy_in_turn(CUevent event) {
  return destroy_event(symbol::of_cuEventDestroy, event);
}
SLUICE_ORDERED_CALL CUresult cuEventDestroy_v2_in_turn(CUevent event) {
  return destroy_event(symbol::of_cuEventDestroy_v2, event);
}
SLUICE_ORDERED_CALL CUresult cuEventElapsedTime_in_turn(float* milliseconds, CUevent from,
                                                        CUevent to) {
  return elapsed_time(symbol::of_cuEventElapsedTime, milliseconds, from, to);
}
SLUICE_ORDERED_CALL CUresult cuEventElapsedTime_v2_in_turn(float* milliseconds, CUevent from,
                                                           CUevent to) {
  return elapsed_time(symbol::of_cuEventElapsedTime_v2, milliseconds, from, to);
}
