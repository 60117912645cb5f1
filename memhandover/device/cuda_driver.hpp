/// The functions of the CUDA driver that Sluice calls, found at run time, so that one binary runs
/// with and without a GPU.
///
/// In a training process the names must come from the driver itself and not through the gate, which
/// answers the same library name; there the gate's `real` is the resolver.
#pragma once

#include <cuda.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace sluice::memhandover {

// The names are macros in cuda.h that expand to the current version of each function, e.g.
// cuMemGetInfo_v2.
// clang-format off
#define SLUICE_CUDA_FUNCTIONS(X) \
  X(cuInit) \
  X(cuGetErrorString) \
  X(cuDeviceGet) \
  X(cuDeviceGetCount) \
  X(cuDeviceGetUuid) \
  X(cuDevicePrimaryCtxRetain) \
  X(cuDevicePrimaryCtxRelease) \
  X(cuCtxSetCurrent) \
  X(cuCtxGetCurrent) \
  X(cuCtxGetDevice) \
  X(cuMemGetInfo) \
  X(cuMemGetAllocationGranularity) \
  X(cuMemCreate) \
  X(cuMemRelease) \
  X(cuMemExportToShareableHandle) \
  X(cuMemImportFromShareableHandle) \
  X(cuMemAddressReserve) \
  X(cuMemAddressFree) \
  X(cuMemMap) \
  X(cuMemUnmap) \
  X(cuMemSetAccess) \
  X(cuMemHostRegister) \
  X(cuMemHostUnregister) \
  X(cuMemsetD8Async) \
  X(cuStreamCreateWithPriority) \
  X(cuStreamSynchronize) \
  X(cuStreamDestroy) \
  X(cuMemAlloc) \
  X(cuMemFree) \
  X(cuMemHostAlloc) \
  X(cuMemcpyDtoHAsync) \
  X(cuMemcpyHtoDAsync) \
  X(cuEventCreate) \
  X(cuEventDestroy) \
  X(cuEventQuery) \
  X(cuEventRecord) \
  X(cuModuleLoadData) \
  X(cuModuleUnload) \
  X(cuModuleGetFunction) \
  X(cuLaunchKernel)
// clang-format on

struct cuda_driver {
#define SLUICE_DECLARE(name) decltype(&::name) name = nullptr;
  SLUICE_CUDA_FUNCTIONS(SLUICE_DECLARE)
#undef SLUICE_DECLARE

  /// All functions by `resolve(name)`. Throws `unsupported` naming the first that is missing.
  static std::shared_ptr<cuda_driver const> load(std::function<void*(char const*)> const& resolve);
  /// The same from the machine's libcuda.so.1. Throws `unsupported` if there is none.
  static std::shared_ptr<cuda_driver const> open();

  /// Throws for a result other than success: `out_of_memory`, `unsupported` or `internal`, with the
  /// driver's text after `doing`, words and numbers that are put together only then. For a call that
  /// succeeded nothing is allocated: if that failed, what the call has made would be lost.
  template <typename... Parts>
  void check(CUresult result, Parts const&... doing) const {
    if (result != CUDA_SUCCESS) {
      fail(result, (std::string{} + ... + as_text(doing)));
    }
  }

 private:
  static std::string as_text(std::string_view words) {
    return std::string{words};
  }
  static std::string as_text(std::integral auto number) {
    return std::to_string(number);
  }
  [[noreturn]] void fail(CUresult result, std::string const& doing) const;
};

/// Whether this machine has a driver and at least one device it can see.
[[nodiscard]] bool cuda_available() noexcept;

}  // namespace sluice::memhandover
