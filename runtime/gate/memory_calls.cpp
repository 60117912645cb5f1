/// Calls about device memory: the runtime answers them from the pool where it can, else the driver
/// does.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"

using namespace sluice::gate;

namespace {

/// Rows of a pitched allocation begin at multiples of this, as the driver aligns them.
constexpr std::size_t pitch_alignment = 512;

/// Memory from the pool, or why not; nothing if the driver has to answer.
std::optional<CUresult> allocate(CUdeviceptr* address, std::size_t bytes) {
  sluice_runtime_api const* runtime = sharing_runtime();
  if (runtime == nullptr || address == nullptr || bytes == 0) {
    return std::nullopt;
  }
  std::uint64_t found = 0;
  switch (runtime->mem_alloc(sharing_device(), &found, bytes)) {
    case SLUICE_ALLOC_OK:
      *address = found;
      return CUDA_SUCCESS;
    case SLUICE_ALLOC_OUT_OF_MEMORY:
      return CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return std::nullopt;
  }
}

struct allocation {
  std::uint64_t base = 0;
  std::size_t bytes = 0;
};

bool find_in_pool(CUdeviceptr address, allocation& found) {
  sluice_runtime_api const* runtime = sharing_runtime();
  return runtime != nullptr &&
         runtime->address_range(address, &found.base, &found.bytes) == SLUICE_ALLOC_OK;
}

/// Callers rely on what the driver's cuMemFree does: whatever still uses the memory is done when it returns. Nothing if the
/// memory is not the pool's.
std::optional<CUresult> free_in_pool(CUdeviceptr address) {
  allocation found;
  if (address == 0 || !find_in_pool(address, found)) {
    return std::nullopt;
  }
  if (found.base != address) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  wait_for_launches();
  return sharing_runtime()->mem_free(address) == SLUICE_ALLOC_OK ? std::optional{CUDA_SUCCESS}
                                                                 : std::nullopt;
}

/// So memory of cuMemAlloc may be freed, too. The pool does not hand memory out in a stream's order, so that it is waited for.
/// What a capture may not hold, the driver refuses.
CUresult free_async(symbol which, CUdeviceptr address, CUstream given, CUstream stream) {
  flush_if_deferring(which);
  if (auto const answer = driver::takes_events(stream) ? free_in_pool(address) : std::nullopt) {
    return *answer;
  }
  return real<CUresult (*)(CUdeviceptr, CUstream)>(which)(address, given);
}

struct memory_info {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// What the job has of a device's pool, without one of the current context's; nothing if the driver has to answer.
std::optional<memory_info> info_of_pool(std::optional<int> device = std::nullopt) {
  sluice_runtime_api const* runtime = sharing_runtime();
  memory_info found;
  if (runtime == nullptr ||
      runtime->mem_info(device ? *device : sharing_device(), &found.free_bytes,
                        &found.total_bytes) != SLUICE_ALLOC_OK) {
    return std::nullopt;
  }
  return found;
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  if (std::optional<CUresult> const answer = allocate(address, bytes)) {
    return *answer;
  }
  return real<CUresult (*)(CUdeviceptr*, std::size_t)>(symbol::of_cuMemAlloc_v2)(address, bytes);
}

SLUICE_DRIVER_CALL CUresult cuMemAllocPitch_v2(CUdeviceptr* address, std::size_t* pitch,
                                               std::size_t width, std::size_t height,
                                               unsigned int element) {
  bool const representable = width <= std::numeric_limits<std::size_t>::max() - pitch_alignment;
  std::size_t const row =
      representable ? (width + pitch_alignment - 1) / pitch_alignment * pitch_alignment : 0;
  std::size_t bytes = 0;
  bool const valid = pitch != nullptr && (element == 4 || element == 8 || element == 16) &&
                     !__builtin_mul_overflow(row, height, &bytes);
  if (std::optional<CUresult> const answer = valid ? allocate(address, bytes) : std::nullopt) {
    if (*answer == CUDA_SUCCESS) {
      *pitch = row;
    }
    return *answer;
  }
  using driver_function =
      CUresult (*)(CUdeviceptr*, std::size_t*, std::size_t, std::size_t, unsigned int);
  return real<driver_function>(symbol::of_cuMemAllocPitch_v2)(address, pitch, width, height,
                                                              element);
}

SLUICE_DRIVER_CALL CUresult cuMemFree_v2(CUdeviceptr address) {
  flush_if_deferring(symbol::of_cuMemFree_v2);
  if (auto const answer = free_in_pool(address)) {
    return *answer;
  }
  return real<CUresult (*)(CUdeviceptr)>(symbol::of_cuMemFree_v2)(address);
}

SLUICE_DRIVER_CALL CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return free_async(symbol::of_cuMemFreeAsync, address, stream, stream);
}
SLUICE_DRIVER_CALL CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
  return free_async(symbol::of_cuMemFreeAsync_ptsz, address, stream,
                    stream != nullptr ? stream : CU_STREAM_PER_THREAD);
}

SLUICE_DRIVER_CALL CUresult cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  if (auto const pool = info_of_pool()) {
    if (free_bytes != nullptr) {
      *free_bytes = pool->free_bytes;
    }
    if (total_bytes != nullptr) {
      *total_bytes = pool->total_bytes;
    }
    return CUDA_SUCCESS;
  }
  return real<CUresult (*)(std::size_t*, std::size_t*)>(symbol::of_cuMemGetInfo_v2)(free_bytes,
                                                                                    total_bytes);
}

/// What `cuMemGetInfo` says as well, since programs take a share of the one and count it from the other.
/// They ask before there is a context, and so before this process has joined the pool: then it is
/// what the job's pools are to have, if that was said.
SLUICE_DRIVER_CALL CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  using driver_function = CUresult (*)(std::size_t*, CUdevice);
  auto const result = real<driver_function>(symbol::of_cuDeviceTotalMem_v2)(bytes, device);
  if (result != CUDA_SUCCESS || bytes == nullptr || the_gate().inert()) {
    return result;
  }
  std::size_t total = 0;
  if (!attach_if_due()) {
    char const* const said = std::getenv("SLUICE_POOL_BYTES");
    total = said != nullptr ? std::strtoull(said, nullptr, 10) : 0;
  } else if (auto const pool = info_of_pool(device)) {
    total = pool->total_bytes;
  }
  *bytes = total > 0 ? std::min(total, *bytes) : *bytes;
  return result;
}

SLUICE_DRIVER_CALL CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                                    CUdeviceptr address) {
  allocation found;
  if (find_in_pool(address, found)) {
    if (base != nullptr) {
      *base = found.base;
    }
    if (bytes != nullptr) {
      *bytes = found.bytes;
    }
    return CUDA_SUCCESS;
  }
  using driver_function = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  return real<driver_function>(symbol::of_cuMemGetAddressRange_v2)(base, bytes, address);
}
