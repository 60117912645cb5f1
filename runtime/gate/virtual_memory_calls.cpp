/// Calls of the driver's virtual memory management: what the program makes and maps itself comes out of the pool where it can
/// (virtual_memory.hpp). How other memory of the pool is mapped, and who has access, is the runtime's business: for a program
/// it is memory of cuMemAlloc, of which the driver says the same.
#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/virtual_memory.hpp"

using namespace sluice::gate;

namespace {

using handle = CUmemGenericAllocationHandle;

}  // namespace

SLUICE_DRIVER_CALL CUresult cuMemCreate(handle* made, std::size_t bytes,
                                        CUmemAllocationProp const* wanted,
                                        unsigned long long flags) {
  if (auto const answer = the_virtual_memory().create(made, bytes, wanted, flags)) {
    return *answer;
  }
  using driver_function =
      CUresult (*)(handle*, std::size_t, CUmemAllocationProp const*, unsigned long long);
  return real<driver_function>(symbol::of_cuMemCreate)(made, bytes, wanted, flags);
}

SLUICE_DRIVER_CALL CUresult cuMemRelease(handle which) {
  flush_if_deferring(symbol::of_cuMemRelease);
  if (auto const answer = the_virtual_memory().release(which)) {
    return *answer;
  }
  return real<CUresult (*)(handle)>(symbol::of_cuMemRelease)(which);
}

SLUICE_DRIVER_CALL CUresult cuMemRetainAllocationHandle(handle* found, void* address) {
  auto const where = reinterpret_cast<CUdeviceptr>(address);
  if (auto const answer = the_virtual_memory().retain(found, where)) {
    return *answer;
  }
  // By a handle memory would be reached when it has changed its owner. Libraries ask for one to see whether they can share
  // a buffer, and go another way if they get the driver's answer for memory of cuMemAlloc: that it has none.
  if (is_pool_memory(where)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  using driver_function = CUresult (*)(handle*, void*);
  return real<driver_function>(symbol::of_cuMemRetainAllocationHandle)(found, address);
}

SLUICE_DRIVER_CALL CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* out,
                                                                   handle which) {
  if (auto const answer = the_virtual_memory().properties(out, which)) {
    return *answer;
  }
  using driver_function = CUresult (*)(CUmemAllocationProp*, handle);
  return real<driver_function>(symbol::of_cuMemGetAllocationPropertiesFromHandle)(out, which);
}

SLUICE_DRIVER_CALL CUresult cuMemExportToShareableHandle(void* out, handle which,
                                                         CUmemAllocationHandleType type,
                                                         unsigned long long flags) {
  if (CUresult const result = the_virtual_memory().surrender(which); result != CUDA_SUCCESS) {
    return result;
  }
  using driver_function =
      CUresult (*)(void*, handle, CUmemAllocationHandleType, unsigned long long);
  return real<driver_function>(symbol::of_cuMemExportToShareableHandle)(out, which, type, flags);
}

SLUICE_DRIVER_CALL CUresult cuMulticastBindMem(handle to, std::size_t offset, handle which,
                                               std::size_t from, std::size_t bytes,
                                               unsigned long long flags) {
  flush_if_deferring(symbol::of_cuMulticastBindMem);
  if (CUresult const result = the_virtual_memory().surrender(which); result != CUDA_SUCCESS) {
    return result;
  }
  using driver_function =
      CUresult (*)(handle, std::size_t, handle, std::size_t, std::size_t, unsigned long long);
  return real<driver_function>(symbol::of_cuMulticastBindMem)(to, offset, which, from, bytes,
                                                              flags);
}

SLUICE_DRIVER_CALL CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                                     handle which, unsigned long long flags) {
  if (is_mapped_by_runtime(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (auto const answer = the_virtual_memory().map(address, bytes, offset, which, flags)) {
    return *answer;
  }
  using driver_function =
      CUresult (*)(CUdeviceptr, std::size_t, std::size_t, handle, unsigned long long);
  return real<driver_function>(symbol::of_cuMemMap)(address, bytes, offset, which, flags);
}

SLUICE_DRIVER_CALL CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  flush_if_deferring(symbol::of_cuMemUnmap);
  if (auto const answer = the_virtual_memory().unmap(address, bytes)) {
    return *answer;
  }
  if (is_mapped_by_runtime(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return real<CUresult (*)(CUdeviceptr, std::size_t)>(symbol::of_cuMemUnmap)(address, bytes);
}

SLUICE_DRIVER_CALL CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes,
                                           CUmemAccessDesc const* wanted, std::size_t count) {
  if (auto const answer = the_virtual_memory().set_access(address, bytes, wanted, count)) {
    return *answer;
  }
  if (is_mapped_by_runtime(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  using driver_function =
      CUresult (*)(CUdeviceptr, std::size_t, CUmemAccessDesc const*, std::size_t);
  return real<driver_function>(symbol::of_cuMemSetAccess)(address, bytes, wanted, count);
}

SLUICE_DRIVER_CALL CUresult cuMemAddressReserve(CUdeviceptr* made, std::size_t bytes,
                                                std::size_t alignment, CUdeviceptr wish,
                                                unsigned long long flags) {
  if (auto const answer = the_virtual_memory().reserve(made, bytes, alignment, wish, flags)) {
    return *answer;
  }
  using driver_function =
      CUresult (*)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long);
  return real<driver_function>(symbol::of_cuMemAddressReserve)(made, bytes, alignment, wish, flags);
}

SLUICE_DRIVER_CALL CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  flush_if_deferring(symbol::of_cuMemAddressFree);
  if (auto const answer = the_virtual_memory().free_addresses(address, bytes)) {
    return *answer;
  }
  if (is_mapped_by_runtime(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return real<CUresult (*)(CUdeviceptr, std::size_t)>(symbol::of_cuMemAddressFree)(address, bytes);
}
