/// Calls that end streams and contexts: the gate makes what was left for them and forgets them first,
/// because the driver may give their handles out again at once.
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"

using namespace sluice::gate;

namespace {

CUresult destroy_stream(symbol which, CUstream stream) {
  if (!the_gate().inert()) {
    flush_if_deferring(which);
    forget_capture(stream);
    streams().forget_stream(stream);
  }
  return real<CUresult (*)(CUstream)>(which)(stream);
}

CUresult destroy_context(symbol which, CUcontext context) {
  if (!the_gate().inert()) {
    flush_if_deferring(which);
    end_submissions(context);
    streams().forget_context(context);
  }
  return real<CUresult (*)(CUcontext)>(which)(context);
}

CUresult release_device(symbol which, CUdevice device) {
  flush_if_deferring(which);
  CUresult const result = real<CUresult (*)(CUdevice)>(which)(device);
  if (!the_gate().inert() && !driver::primary_context_is_active(device)) {
    end_submissions_on(device);
    streams().forget_device(device);
  }
  return result;
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuStreamDestroy(CUstream stream) {
  return destroy_stream(symbol::of_cuStreamDestroy, stream);
}
SLUICE_DRIVER_CALL CUresult cuStreamDestroy_v2(CUstream stream) {
  return destroy_stream(symbol::of_cuStreamDestroy_v2, stream);
}
SLUICE_DRIVER_CALL CUresult cuCtxDestroy(CUcontext context) {
  return destroy_context(symbol::of_cuCtxDestroy, context);
}
SLUICE_DRIVER_CALL CUresult cuCtxDestroy_v2(CUcontext context) {
  return destroy_context(symbol::of_cuCtxDestroy_v2, context);
}
SLUICE_DRIVER_CALL CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return release_device(symbol::of_cuDevicePrimaryCtxRelease, device);
}
SLUICE_DRIVER_CALL CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return release_device(symbol::of_cuDevicePrimaryCtxRelease_v2, device);
}
SLUICE_DRIVER_CALL CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  return release_device(symbol::of_cuDevicePrimaryCtxReset, device);
}
SLUICE_DRIVER_CALL CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  return release_device(symbol::of_cuDevicePrimaryCtxReset_v2, device);
}
