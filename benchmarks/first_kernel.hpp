/// A kernel that writes to memory which has just been handed over: the end of a handover as the
/// model that needed the memory sees it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "benchmarks/driver_function.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::benchmarks {

/// Thread-safety: none; one thread, whose current context it sets.
class first_kernel {
 public:
  /// On that device's primary context. Throws `unsupported` without a driver.
  explicit first_kernel(int device);
  first_kernel(first_kernel const&) = delete;
  first_kernel& operator=(first_kernel const&) = delete;
  ~first_kernel();

  /// Writes a byte every `stride` bytes, and returns when that is done.
  void run(std::byte* memory, std::uint64_t bytes, std::uint64_t stride);

 private:
  std::shared_ptr<memhandover::cuda_driver const> cuda_;
  decltype(&::cuLaunchKernel) launch_ =
      bench::driver_function<decltype(&::cuLaunchKernel)>("cuLaunchKernel");
  decltype(&::cuModuleUnload) unload_ =
      bench::driver_function<decltype(&::cuModuleUnload)>("cuModuleUnload");
  CUdevice device_ = 0;
  CUmodule module_ = nullptr;
  CUfunction touch_ = nullptr;
  CUstream stream_ = nullptr;
};

}  // namespace sluice::benchmarks
