/// Calls that the pool has no answer to: they keep the driver's answer, or are refused, and the user
/// hears once what that means for him.
#include <atomic>
#include <cstdint>
#include <cstdio>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"

using namespace sluice::gate;

namespace {

void say_once(std::atomic_flag& said, char const* text) {
  if (!said.test_and_set()) {
    std::fprintf(stderr, "sluice: %s\n", text);
  }
}

constinit std::atomic_flag warned_of_handles;
constinit std::atomic_flag warned_of_ranges;
constinit std::atomic_flag warned_of_async_memory;

CUresult warn_of_async_memory(CUresult result) {
  if (result == CUDA_SUCCESS && sharing_runtime() != nullptr) {
    say_once(
        warned_of_async_memory,
        "this process takes memory with cudaMallocAsync (cuMemAllocAsync). It lies outside the "
        "pool: it is not counted there, and no inference server can have it. Where the pool "
        "leaves little of the GPU, use cudaMalloc instead.");
  }
  return result;
}

CUresult allocate_async(symbol which, CUdeviceptr* address, std::size_t bytes, CUstream stream) {
  flush_if_deferring(which);
  using driver_function = CUresult (*)(CUdeviceptr*, std::size_t, CUstream);
  return warn_of_async_memory(real<driver_function>(which)(address, bytes, stream));
}

CUresult allocate_from_pool_async(symbol which, CUdeviceptr* address, std::size_t bytes,
                                  CUmemoryPool pool, CUstream stream) {
  flush_if_deferring(which);
  using driver_function = CUresult (*)(CUdeviceptr*, std::size_t, CUmemoryPool, CUstream);
  return warn_of_async_memory(real<driver_function>(which)(address, bytes, pool, stream));
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  if (is_pool_memory(address)) {
    say_once(warned_of_handles,
             "this process has asked for an IPC handle of pool memory (cuIpcGetMemHandle), as "
             "torch.multiprocessing does to send a CUDA tensor to another process. Pool memory can "
             "change its owner, so that there is no such handle: send tensor.cpu(), and move it to "
             "the GPU where it arrives.");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return real<CUresult (*)(CUipcMemHandle*, CUdeviceptr)>(symbol::of_cuIpcGetMemHandle)(handle,
                                                                                        address);
}

// By a handle, or a binding, memory is reached when it has changed its owner, and nobody here would
// know. Libraries ask for one to see whether they can share a buffer, and go another way if they get
// the driver's answer for memory of cuMemAlloc: that it has none.

SLUICE_DRIVER_CALL CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle to, std::size_t offset,
                                                CUdeviceptr address, std::size_t bytes,
                                                unsigned long long flags) {
  flush_if_deferring(symbol::of_cuMulticastBindAddr);
  if (is_pool_memory(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  using driver_function = CUresult (*)(CUmemGenericAllocationHandle, std::size_t, CUdeviceptr,
                                       std::size_t, unsigned long long);
  return real<driver_function>(symbol::of_cuMulticastBindAddr)(to, offset, address, bytes, flags);
}

/// The driver would have one for memory of cuMemAlloc, too.
SLUICE_DRIVER_CALL CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address,
                                                          std::size_t bytes,
                                                          CUmemRangeHandleType type,
                                                          unsigned long long flags) {
  if (is_pool_memory(address)) {
    say_once(warned_of_ranges,
             "this process has asked for a handle of pool memory (cuMemGetHandleForAddressRange), "
             "as libraries do to let a network card or another device reach it. Pool memory can "
             "change its owner, so that there is no such handle: have the library send through the "
             "host's memory, or through a buffer that it makes itself (cuMemCreate).");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  using driver_function =
      CUresult (*)(void*, CUdeviceptr, std::size_t, CUmemRangeHandleType, unsigned long long);
  return real<driver_function>(symbol::of_cuMemGetHandleForAddressRange)(handle, address, bytes,
                                                                         type, flags);
}

SLUICE_DRIVER_CALL CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t bytes,
                                            CUstream stream) {
  return allocate_async(symbol::of_cuMemAllocAsync, address, bytes, stream);
}
SLUICE_DRIVER_CALL CUresult cuMemAllocAsync_ptsz(CUdeviceptr* address, std::size_t bytes,
                                                 CUstream stream) {
  return allocate_async(symbol::of_cuMemAllocAsync_ptsz, address, bytes, stream);
}
SLUICE_DRIVER_CALL CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, std::size_t bytes,
                                                    CUmemoryPool pool, CUstream stream) {
  return allocate_from_pool_async(symbol::of_cuMemAllocFromPoolAsync, address, bytes, pool, stream);
}
SLUICE_DRIVER_CALL CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, std::size_t bytes,
                                                         CUmemoryPool pool, CUstream stream) {
  return allocate_from_pool_async(symbol::of_cuMemAllocFromPoolAsync_ptsz, address, bytes, pool,
                                  stream);
}
