/// Stream and event calls.
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fake_driver/fake_stream.hpp"

using namespace sluice::fake;

namespace {

event* event_of(CUevent handle) {
  return reinterpret_cast<event*>(handle);
}
CUresult no_stream() {
  return current_context() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
}

CUresult create_stream(CUstream* out, unsigned flags) {
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *out = publish(stream::start(current_context(), flags));
  return CUDA_SUCCESS;
}

CUresult synchronise(CUstream handle, bool per_thread) {
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  std::shared_ptr<stream> const on = stream_of(handle, per_thread);
  if (on == nullptr) {
    return no_stream();
  }
  on->mark()->wait();
  return context_state();
}

CUresult query(CUstream handle, bool per_thread) {
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  std::shared_ptr<stream> const on = stream_of(handle, per_thread);
  if (on == nullptr) {
    return no_stream();
  }
  return on->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult record(CUevent handle, CUstream where, bool per_thread) {
  std::shared_ptr<stream> const on = stream_of(where, per_thread);
  if (on == nullptr || handle == nullptr) {
    return no_stream();
  }
  event& one = *event_of(handle);
  std::lock_guard const guard{captures().lock};
  std::lock_guard const inner{one.lock};
  one.recorded_inside = on->captured_by;
  if (on->captured_by == nullptr) {
    one.last = on->mark();
  }
  return CUDA_SUCCESS;
}

CUresult wait_for_event(CUstream where, CUevent handle, bool per_thread) {
  std::shared_ptr<stream> const on = stream_of(where, per_thread);
  if (on == nullptr || handle == nullptr) {
    return no_stream();
  }
  event& one = *event_of(handle);
  std::shared_ptr<marker> point;
  {
    std::lock_guard const guard{captures().lock};
    std::lock_guard const inner{one.lock};
    if (one.recorded_inside != nullptr) {
      on->captured_by = one.recorded_inside;  // the stream joins the capture
      return CUDA_SUCCESS;
    }
    point = one.last;
  }
  return point == nullptr ? CUDA_SUCCESS : enqueue(where, per_thread, [point] { point->wait(); });
}

CUresult elapsed(float* milliseconds, CUevent from, CUevent to) {
  if (from == nullptr || to == nullptr || from == to) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  std::scoped_lock const guard{event_of(from)->lock, event_of(to)->lock};
  std::shared_ptr<marker> const start = event_of(from)->last;
  std::shared_ptr<marker> const end = event_of(to)->last;
  if (start == nullptr || end == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!start->has_happened() || !end->has_happened()) {
    return CUDA_ERROR_NOT_READY;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return CUDA_SUCCESS;
}

}  // namespace

SLUICE_FAKE_CALL CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  SLUICE_FAKE_ENTER
  return create_stream(out, flags);
}
SLUICE_FAKE_CALL CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags,
                                                     int /*priority*/) {
  SLUICE_FAKE_ENTER
  return create_stream(out, flags);
}
SLUICE_FAKE_CALL CUresult cuStreamDestroy_v2(CUstream handle) {
  SLUICE_FAKE_ENTER
  std::shared_ptr<stream> const one = withdraw(handle);
  if (one == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  one->retire();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  SLUICE_FAKE_ENTER
  std::shared_ptr<stream> const one = stream_of(handle, false);
  if (one == nullptr || flags == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  *flags = one->flags();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuStreamSynchronize(CUstream handle) {
  SLUICE_FAKE_ENTER
  return synchronise(handle, false);
}
SLUICE_FAKE_CALL CUresult cuStreamSynchronize_ptsz(CUstream handle) {
  SLUICE_FAKE_ENTER
  return synchronise(handle, true);
}
SLUICE_FAKE_CALL CUresult cuStreamQuery(CUstream handle) {
  SLUICE_FAKE_ENTER
  return query(handle, false);
}
SLUICE_FAKE_CALL CUresult cuStreamQuery_ptsz(CUstream handle) {
  SLUICE_FAKE_ENTER
  return query(handle, true);
}
SLUICE_FAKE_CALL CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  return wait_for_event(handle, event, false);
}
SLUICE_FAKE_CALL CUresult cuStreamWaitEvent_ptsz(CUstream handle, CUevent event,
                                                 unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  return wait_for_event(handle, event, true);
}

SLUICE_FAKE_CALL CUresult cuEventCreate(CUevent* out, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *out = reinterpret_cast<CUevent>(new event);
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuEventDestroy_v2(CUevent handle) {
  SLUICE_FAKE_ENTER
  delete event_of(handle);
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuEventRecord(CUevent handle, CUstream where) {
  SLUICE_FAKE_ENTER
  return record(handle, where, false);
}
SLUICE_FAKE_CALL CUresult cuEventRecord_ptsz(CUevent handle, CUstream where) {
  SLUICE_FAKE_ENTER
  return record(handle, where, true);
}
SLUICE_FAKE_CALL CUresult cuEventQuery(CUevent handle) {
  SLUICE_FAKE_ENTER
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  event& one = *event_of(handle);
  std::lock_guard const guard{one.lock};
  if (one.recorded_inside != nullptr) {
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  return one.last == nullptr || one.last->has_happened() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
SLUICE_FAKE_CALL CUresult cuEventSynchronize(CUevent handle) {
  SLUICE_FAKE_ENTER
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  std::shared_ptr<marker> point;
  {
    std::lock_guard const guard{event_of(handle)->lock};
    point = event_of(handle)->last;
  }
  if (point != nullptr) {
    point->wait();
  }
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) {
  SLUICE_FAKE_ENTER
  return elapsed(milliseconds, from, to);
}
#undef cuEventElapsedTime
SLUICE_FAKE_CALL CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  SLUICE_FAKE_ENTER
  return elapsed(milliseconds, from, to);
}
