/// Kinds of device memory that differ from cuMemAlloc's only in what the tests do not look at.
#include <iterator>
#include <map>
#include <mutex>

#include "tests/fake_driver/fake_memory.hpp"

namespace {

std::mutex registering;
std::map<char const*, std::size_t> registered;  // guarded by it: bytes by address

}  // namespace

bool sluice::fake::is_registered(void const* address) {
  auto const* const at = static_cast<char const*>(address);
  std::lock_guard const lock{registering};
  auto const next = registered.upper_bound(at);
  return next != registered.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

/// Of two that overlap the second is refused.
SLUICE_FAKE_CALL CUresult cuMemHostRegister_v2(void* where, std::size_t bytes, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  auto const* const first = static_cast<char const*>(where);
  if (first == nullptr || bytes == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::lock_guard const lock{registering};
  auto const next = registered.lower_bound(first);
  if (next != registered.end() && next->first < first + bytes) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  if (next != registered.begin()) {
    auto const before = std::prev(next);
    if (before->first + before->second > first) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
  }
  registered.emplace(first, bytes);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemHostUnregister(void* where) {
  SLUICE_FAKE_ENTER
  std::lock_guard const lock{registering};
  return registered.erase(static_cast<char const*>(where)) == 1
             ? CUDA_SUCCESS
             : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

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

SLUICE_FAKE_CALL CUresult cuMemFreeAsync(CUdeviceptr address, CUstream /*stream*/) {
  SLUICE_FAKE_ENTER
  return cuMemFree_v2(address);
}
