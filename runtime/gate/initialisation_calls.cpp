/// Calls that must have an answer also without a driver.
#include "runtime/gate/dispatch.hpp"

using namespace sluice::gate;

SLUICE_DRIVER_CALL CUresult cuInit(unsigned int flags) {
  the_gate().prepare();
  if (!driver_is_open()) {
    return CUDA_ERROR_NO_DEVICE;
  }
  return real<CUresult (*)(unsigned int)>(symbol::of_cuInit)(flags);
}

// Callers print the text without looking at the result, so it has to be set.
SLUICE_DRIVER_CALL CUresult cuGetErrorName(CUresult error, char const** text) {
  the_gate().prepare();
  if (!driver_is_open() && text != nullptr) {
    *text = "CUDA_ERROR_NO_DEVICE";
    return CUDA_SUCCESS;
  }
  return real<CUresult (*)(CUresult, char const**)>(symbol::of_cuGetErrorName)(error, text);
}

SLUICE_DRIVER_CALL CUresult cuGetErrorString(CUresult error, char const** text) {
  the_gate().prepare();
  if (!driver_is_open() && text != nullptr) {
    *text = "this machine has no CUDA driver";
    return CUDA_SUCCESS;
  }
  return real<CUresult (*)(CUresult, char const**)>(symbol::of_cuGetErrorString)(error, text);
}
