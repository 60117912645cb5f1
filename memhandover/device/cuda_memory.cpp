#include "memhandover/device/cuda_memory.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

/// Left outside the pool by default: contexts, modules and library workspaces of the processes that
/// share the device.
constexpr std::uint64_t default_headroom = 8_GiB;

CUmemAllocationProp chunk_properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

gpu_uuid uuid_of(cuda_driver const& driver, CUdevice device) {
  CUuuid uuid{};
  driver.check(driver.cuDeviceGetUuid(&uuid, device), "cannot ask which GPU it is");
  gpu_uuid result{};
  std::transform(std::begin(uuid.bytes), std::end(uuid.bytes), result.begin(),
                 [](char byte) { return static_cast<std::uint8_t>(byte); });
  return result;
}

/// Processes that see different GPUs count them differently, and memory of another GPU can be mapped
/// where the two are connected: it would be slow, and nobody would know why.
void expect_gpu(pool_shape const& pool, gpu_uuid const& here) {
  if (here == pool.gpu) {
    return;
  }
  char const* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  auto const number = std::to_string(pool.device);
  throw error{error_kind::invalid_argument,
              "the pool of GPU " + number + " lies on " + to_string(pool.gpu) + ", but here GPU " +
                  number + " is " + to_string(here) + " (CUDA_VISIBLE_DEVICES is " +
                  (visible == nullptr ? "not set" : visible) +
                  "); start all that share a runtime folder with the same CUDA_VISIBLE_DEVICES and "
                  "tell them apart by --device, or give each its own --runtime-dir"};
}

CUdeviceptr address(std::byte* where) {
  return reinterpret_cast<CUdeviceptr>(where);
}

}  // namespace

cuda_memory::cuda_memory(pool_shape const& shape, pool_descriptors const& descriptors, int device,
                         std::shared_ptr<cuda_driver const> driver)
    : shape_(shape),
      descriptors_(descriptors),
      device_(device),
      driver_(std::move(driver)),
      handles_(shape.chunk_count) {
  CUdevice handle = 0;
  driver_->check(driver_->cuDeviceGet(&handle, device_), "cannot use GPU ", device_);
  expect_gpu(shape_, uuid_of(*driver_, handle));
  driver_->check(driver_->cuDevicePrimaryCtxRetain(&context_, handle), "cannot start GPU ",
                 device_);
  use_context();
  // Zeroing goes before other work on the device: somebody waits for it.
  constexpr int highest_priority = std::numeric_limits<int>::min();  // the driver takes its highest
  driver_->check(
      driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, highest_priority),
      "cannot create a stream");
}

void cuda_memory::use_context() const {
  CUcontext current = nullptr;
  if (driver_->cuCtxGetCurrent(&current) != CUDA_SUCCESS || current == nullptr) {
    driver_->check(driver_->cuCtxSetCurrent(context_), "cannot use GPU ", device_);
  }
}

cuda_memory::~cuda_memory() {
  driver_->cuStreamDestroy(stream_);
  for (auto const handle : handles_) {
    if (handle != 0) {
      driver_->cuMemRelease(handle);
    }
  }
}

std::byte* cuda_memory::reserve(std::uint32_t chunks) {
  use_context();
  CUdeviceptr where = 0;
  auto const bytes = chunks * shape_.chunk_bytes;
  auto const amount = format_bytes(bytes);
  driver_->check(driver_->cuMemAddressReserve(&where, bytes, shape_.chunk_bytes, 0, 0),
                 "cannot reserve ", amount, " of device addresses");
  return reinterpret_cast<std::byte*>(where);
}

void cuda_memory::release(std::byte* where, std::uint32_t chunks) noexcept {
  driver_->cuMemAddressFree(address(where), chunks * shape_.chunk_bytes);
}

CUmemGenericAllocationHandle cuda_memory::import(std::uint32_t chunk) {
  std::lock_guard const lock{mutex_};
  auto& handle = handles_.at(chunk);
  if (handle == 0) {
    // The driver takes the descriptor's number in place of a pointer.
    auto* descriptor =
        reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptors_.at(chunk).get()));
    driver_->check(driver_->cuMemImportFromShareableHandle(
                       &handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                   "cannot import chunk ", chunk, " of the pool");
  }
  return handle;
}

void cuda_memory::map(std::byte* where, std::span<std::uint32_t const> chunks) {
  use_context();
  std::uint32_t mapped = 0;
  try {
    for (auto const chunk : chunks) {
      auto const at = address(where) + mapped * shape_.chunk_bytes;
      driver_->check(driver_->cuMemMap(at, shape_.chunk_bytes, 0, import(chunk), 0),
                     "cannot map a chunk of the pool");
      ++mapped;
    }
    if (mapped > 0) {
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.location.id = device_;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      driver_->check(
          driver_->cuMemSetAccess(address(where), mapped * shape_.chunk_bytes, &access, 1),
          "cannot make chunks of the pool accessible");
    }
  } catch (...) {
    unmap(where, mapped);
    throw;
  }
}

/// A mapping that stays would let this process write into what is another's by then, so a process
/// that cannot remove one ends.
void cuda_memory::unmap(std::byte* where, std::uint32_t count) noexcept {
  if (count == 0 ||
      driver_->cuMemUnmap(address(where), count * shape_.chunk_bytes) == CUDA_SUCCESS) {
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    auto const result =
        driver_->cuMemUnmap(address(where) + i * shape_.chunk_bytes, shape_.chunk_bytes);
    if (result != CUDA_SUCCESS && !nothing_runs_after(result)) {
      spdlog::critical("a chunk that is given away cannot be unmapped; this process ends result={}",
                       static_cast<int>(result));
      std::abort();
    }
  }
}

void cuda_memory::map_private(std::byte* /*where*/, std::uint32_t /*count*/) {
  throw error{error_kind::unsupported, "a GPU has no private pages"};
}

void cuda_memory::scrub(std::byte* where, std::span<std::uint32_t const> chunks) {
  if (chunks.empty()) {
    return;
  }
  use_context();
  driver_->check(
      driver_->cuMemsetD8Async(address(where), 0, chunks.size() * shape_.chunk_bytes, stream_),
      "cannot zero chunks of the pool");
  auto done = driver_->cuStreamSynchronize(stream_);
  if (done != CUDA_SUCCESS) {
    done = driver_->cuStreamSynchronize(stream_);  // nobody may unmap what is still being written
  }
  driver_->check(done, "cannot zero chunks of the pool");
}

cuda_chunks create_cuda_chunks(int device, std::uint64_t pool_bytes, std::uint64_t chunk_bytes) {
  auto const driver = cuda_driver::open();
  CUdevice handle = 0;
  driver->check(driver->cuDeviceGet(&handle, device), "cannot use GPU ", device);
  CUcontext context = nullptr;
  driver->check(driver->cuDevicePrimaryCtxRetain(&context, handle), "cannot start GPU ", device);
  driver->check(driver->cuCtxSetCurrent(context), "cannot start GPU ", device);

  auto const properties = chunk_properties(device);
  std::size_t granularity = 0;
  driver->check(driver->cuMemGetAllocationGranularity(&granularity, &properties,
                                                      CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                "cannot ask for the granularity of device memory");
  if (chunk_bytes % granularity != 0) {
    throw error{error_kind::invalid_argument, "pool.chunk is " + format_bytes(chunk_bytes) +
                                                  " but must be a multiple of " +
                                                  format_bytes(granularity)};
  }
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  driver->check(driver->cuMemGetInfo(&free_bytes, &total_bytes),
                "cannot ask for the free device memory");
  if (pool_bytes == 0) {
    pool_bytes = free_bytes > 2 * default_headroom ? free_bytes - default_headroom : free_bytes / 2;
  } else if (pool_bytes > free_bytes) {
    throw error{error_kind::out_of_memory, "the pool is to have " + format_bytes(pool_bytes) +
                                               " but GPU " + std::to_string(device) + " has " +
                                               format_bytes(free_bytes) + " free of " +
                                               format_bytes(total_bytes) + "; ask for less"};
  }

  cuda_chunks result;
  result.shape = {backend_kind::cuda, device, chunk_bytes,
                  static_cast<std::uint32_t>(pool_bytes / chunk_bytes), uuid_of(*driver, handle)};
  make_room_for_descriptors(result.shape.chunk_count);
  for (std::uint32_t i = 0; i < result.shape.chunk_count; ++i) {
    CUmemGenericAllocationHandle chunk = 0;
    driver->check(driver->cuMemCreate(&chunk, chunk_bytes, &properties, 0), "cannot create chunk ",
                  i, " of the pool");
    int descriptor = -1;
    driver->check(driver->cuMemExportToShareableHandle(&descriptor, chunk,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                  "cannot export chunk ", i, " of the pool");
    result.descriptors.emplace_back(descriptor);
  }
  return result;
}

gpu_uuid uuid_of_gpu(int device) {
  auto const driver = cuda_driver::open();
  CUdevice handle = 0;
  driver->check(driver->cuDeviceGet(&handle, device), "cannot find GPU ", device);
  return uuid_of(*driver, handle);
}

}  // namespace sluice::memhandover
