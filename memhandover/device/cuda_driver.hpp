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
  X(cuMemsetD8Async) \
  X(cuStreamCreateWithPriority) \
  X(cuStreamSynchronize) \
  X(cuStreamDestroy)

// What parking alone needs: a driver without one of them has a pool all the same.
#define SLUICE_CUDA_FUNCTIONS_TO_PIN(X) \
  X(cuMemHostRegister) \
  X(cuMemHostUnregister)
#define SLUICE_CUDA_FUNCTIONS_TO_FOLLOW(X) \
  X(cuEventCreate) \
  X(cuEventDestroy) \
  X(cuEventQuery) \
  X(cuEventRecord)
#define SLUICE_CUDA_FUNCTIONS_TO_COPY(X) \
  X(cuMemcpyDtoHAsync) \
  X(cuMemcpyHtoDAsync)
#define SLUICE_CUDA_FUNCTIONS_TO_HASH(X) \
  X(cuMemHostAlloc) \
  X(cuMemFreeHost) \
  X(cuModuleLoadData) \
  X(cuModuleUnload) \
  X(cuModuleGetFunction) \
  X(cuLaunchKernel)
#define SLUICE_OPTIONAL_CUDA_FUNCTIONS(X) \
  X(cuThreadExchangeStreamCaptureMode) \
  SLUICE_CUDA_FUNCTIONS_TO_PIN(X) \
  SLUICE_CUDA_FUNCTIONS_TO_FOLLOW(X) \
  SLUICE_CUDA_FUNCTIONS_TO_COPY(X) \
  SLUICE_CUDA_FUNCTIONS_TO_HASH(X)
// clang-format on

/// What a driver may be unable to do, as far as a pool is concerned.
enum class driver_part {
  pinning,  ///< host memory that is there already
  copying,  ///< between device and host, followed by events
  hashing,  ///< by a kernel of Sluice's own, followed by events
};

struct cuda_driver {
#define SLUICE_DECLARE(name) decltype(&::name) name = nullptr;
  SLUICE_CUDA_FUNCTIONS(SLUICE_DECLARE)
  SLUICE_OPTIONAL_CUDA_FUNCTIONS(SLUICE_DECLARE)  // null where the driver lacks it
#undef SLUICE_DECLARE

  /// All functions by `resolve(name)`. Throws `unsupported` naming the first that is missing of those
  /// that a pool needs.
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

  /// Throws `unsupported` if a function of that part is missing: "`without`: the driver lacks …".
  void expect(driver_part part, std::string_view without) const;

  /// Waits until no work of a stream uses memory any more, and says how it has ended. A context that
  /// has failed for good does no work. Ends the process if it cannot be known.
  [[nodiscard]] CUresult finish(CUstream stream) const noexcept;

 private:
  static std::string as_text(std::string_view words) {
    return std::string{words};
  }
  static std::string as_text(std::integral auto number) {
    return std::to_string(number);
  }
  [[noreturn]] void fail(CUresult result, std::string const& doing) const;
};

/// While it lives, no call of this thread breaks a capture of another thread, or fails for its sake.
class relaxed_capture {
 public:
  explicit relaxed_capture(cuda_driver const& driver) noexcept
      : driver_(driver), exchanged_(exchange()) {}
  relaxed_capture(relaxed_capture const&) = delete;
  relaxed_capture& operator=(relaxed_capture const&) = delete;
  ~relaxed_capture() {
    if (exchanged_) {
      exchange();
    }
  }

 private:
  bool exchange() noexcept {
    return driver_.cuThreadExchangeStreamCaptureMode != nullptr &&
           driver_.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }

  cuda_driver const& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_;
};

/// Whether a process that gets this result submits no work to the device any more: the driver is
/// shutting down, or the context has failed for good.
[[nodiscard]] bool nothing_runs_after(CUresult result) noexcept;

/// Whether this machine has a driver and at least one device it can see.
[[nodiscard]] bool cuda_available() noexcept;

}  // namespace sluice::memhandover
