/// Functions of the CUDA driver that `memhandover::cuda_driver` lacks, because only benchmarks launch
/// kernels of their own.
#pragma once

namespace sluice::bench {

/// The function of that exported name, with its version (`cuMemcpyDtoH_v2`). Throws `unsupported` if
/// there is no driver or it has none.
[[nodiscard]] void* find_driver_function(char const* name);

template <typename Function>
[[nodiscard]] Function driver_function(char const* name) {
  return reinterpret_cast<Function>(find_driver_function(name));
}

}  // namespace sluice::bench
