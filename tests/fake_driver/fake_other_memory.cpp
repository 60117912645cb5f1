/// Kinds of device memory that differ from cuMemAlloc's only in what the tests do not look at.
#include "tests/fake_driver/fake_core.hpp"

SLUICE_FAKE_CALL CUresult cuMemAllocManaged(CUdeviceptr* out, std::size_t bytes,
                                            unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  return cuMemAlloc_v2(out, bytes);
}

/// Usable at once, also by other streams.
SLUICE_FAKE_CALL CUresult cuMemAllocAsync(CUdeviceptr* out, std::size_t bytes,
                                          CUstream /*stream*/) {
  SLUICE_FAKE_ENTER
  return cuMemAlloc_v2(out, bytes);
}
