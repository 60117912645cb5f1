/// The driver functions that the gate itself uses, past the gate. Each may be called without a
/// driver, and then fails.
#pragma once

#include <chrono>
#include <optional>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/streams.hpp"

namespace sluice::gate::driver {

inline CUcontext current_context() {
  CUcontext context = nullptr;
  bool const known =
      real<CUresult (*)(CUcontext*)>(symbol::of_cuCtxGetCurrent)(&context) == CUDA_SUCCESS;
  return known ? context : nullptr;
}

/// A stream by a handle that means the same in every function.
inline CUstream handle_of(stream_use where) noexcept {
  return is_per_thread(where) ? CU_STREAM_PER_THREAD : where.handle;
}

/// The ordinal of the current context's device, or -1.
inline int current_device() {
  CUdevice device = -1;
  bool const known =
      real<CUresult (*)(CUdevice*)>(symbol::of_cuCtxGetDevice)(&device) == CUDA_SUCCESS;
  return known ? device : -1;
}

inline bool primary_context_is_active(CUdevice device) {
  unsigned flags = 0;
  int active = 0;
  auto const ask =
      real<CUresult (*)(CUdevice, unsigned*, int*)>(symbol::of_cuDevicePrimaryCtxGetState);
  return ask(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

/// Whether memory of the host is page-locked: what copies from it asynchronously reads it later.
inline bool is_pinned(void const* where) {
  unsigned kind = 0;
  auto const ask =
      real<CUresult (*)(void*, CUpointer_attribute, CUdeviceptr)>(symbol::of_cuPointerGetAttribute);
  return ask(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(where)) ==
             CUDA_SUCCESS &&
         kind == CU_MEMORYTYPE_HOST;
}

/// A new event in the current context, or nullptr. One that knows when it happened (`timed`) costs the
/// device several microseconds more.
inline CUevent create_event(bool timed) {
  CUevent event = nullptr;
  auto const create = real<CUresult (*)(CUevent*, unsigned)>(symbol::of_cuEventCreate);
  unsigned const flags = timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
  return create(&event, flags) == CUDA_SUCCESS ? event : nullptr;
}

inline bool record(CUevent event, CUstream stream) {
  return real<CUresult (*)(CUevent, CUstream)>(symbol::of_cuEventRecord)(event, stream) ==
         CUDA_SUCCESS;
}

inline void destroy(CUevent event) {
  real<CUresult (*)(CUevent)>(symbol::of_cuEventDestroy_v2)(event);
}

/// False only while the work before the event is under way: an event that can no longer be asked
/// guards nothing.
inline bool has_completed(CUevent event) {
  return real<CUresult (*)(CUevent)>(symbol::of_cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
}

/// False only while work on the stream is under way.
inline bool has_done_all(CUstream stream) {
  return real<CUresult (*)(CUstream)>(symbol::of_cuStreamQuery)(stream) != CUDA_ERROR_NOT_READY;
}

/// The time between two events that have happened, on one device.
inline std::optional<std::chrono::nanoseconds> elapsed(CUevent from, CUevent to) {
  float milliseconds = 0;
  auto const ask = real<CUresult (*)(float*, CUevent, CUevent)>(symbol::of_cuEventElapsedTime);
  if (ask(&milliseconds, from, to) != CUDA_SUCCESS) {
    return std::nullopt;
  }
  return std::chrono::nanoseconds{static_cast<std::int64_t>(milliseconds * 1e6F)};
}

/// Whether an event recorded on the stream would run rather than become part of a graph. Asking
/// does no harm to a capture; the legacy stream answers with an error while another stream's
/// capture forbids its use.
inline bool takes_events(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  auto const ask =
      real<CUresult (*)(CUstream, CUstreamCaptureStatus*)>(symbol::of_cuStreamIsCapturing);
  return ask(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE;
}

/// While it lives, what this thread does cannot break a capture that is under way somewhere in the
/// process.
class beside_captures {
 public:
  beside_captures() { exchange(); }
  beside_captures(beside_captures const&) = delete;
  beside_captures& operator=(beside_captures const&) = delete;
  ~beside_captures() { exchange(); }

 private:
  void exchange() {
    real<CUresult (*)(CUstreamCaptureMode*)>(symbol::of_cuThreadExchangeStreamCaptureMode)(&mode_);
  }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/// Makes a context current while it lives. `entered` is false if the context is gone.
class in_context {
 public:
  explicit in_context(CUcontext context)
      : entered_(real<CUresult (*)(CUcontext)>(symbol::of_cuCtxPushCurrent_v2)(context) ==
                 CUDA_SUCCESS) {}
  in_context(in_context const&) = delete;
  in_context& operator=(in_context const&) = delete;
  ~in_context() {
    CUcontext popped = nullptr;
    if (entered_) {
      real<CUresult (*)(CUcontext*)>(symbol::of_cuCtxPopCurrent_v2)(&popped);
    }
  }
  [[nodiscard]] bool entered() const noexcept { return entered_; }

 private:
  bool entered_;
};

}  // namespace sluice::gate::driver
