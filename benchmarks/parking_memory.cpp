#include "benchmarks/parking_memory.hpp"

#include <sys/mman.h>

#include <utility>

#include "memhandover/base/system_error.hpp"

namespace sluice::bench {

device_chunks::device_chunks(std::shared_ptr<memhandover::cuda_driver const> driver,
                             std::size_t count, std::size_t chunk_bytes)
    : driver_(std::move(driver)), chunk_bytes_(chunk_bytes) {
  CUdevice device = 0;
  CUcontext context = nullptr;
  driver_->check(driver_->cuDeviceGet(&device, 0), "cannot use the GPU");
  driver_->check(driver_->cuDevicePrimaryCtxRetain(&context, device), "cannot start the GPU");
  driver_->check(driver_->cuCtxSetCurrent(context), "cannot start the GPU");

  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  driver_->check(driver_->cuMemAddressReserve(&where_, count * chunk_bytes, chunk_bytes, 0, 0),
                 "cannot reserve device addresses");
  for (std::size_t i = 0; i < count; ++i) {
    CUmemGenericAllocationHandle handle = 0;
    driver_->check(driver_->cuMemCreate(&handle, chunk_bytes, &properties, 0),
                   "cannot create chunk ", i, " of ", count);
    handles_.push_back(handle);
    driver_->check(driver_->cuMemMap(where_ + i * chunk_bytes, chunk_bytes, 0, handle, 0),
                   "cannot map a chunk");
  }
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  driver_->check(driver_->cuMemSetAccess(where_, bytes(), &access, 1),
                 "cannot make chunks accessible");
}

device_chunks::~device_chunks() {
  driver_->cuMemUnmap(where_, bytes());
  for (auto const handle : handles_) {
    driver_->cuMemRelease(handle);
  }
  driver_->cuMemAddressFree(where_, bytes());
}

pinned_pages::pinned_pages(std::shared_ptr<memhandover::cuda_driver const> driver,
                           std::size_t bytes)
    : driver_(std::move(driver)), bytes_(bytes) {
  driver_->expect(memhandover::driver_part::pinning, "nothing is copied");
  void* const where = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (where == MAP_FAILED) {
    memhandover::throw_system_error("cannot map memory of the host");
  }
  where_ = static_cast<std::byte*>(where);
  driver_->check(driver_->cuMemHostRegister(where_, bytes, CU_MEMHOSTREGISTER_PORTABLE),
                 "cannot pin memory of the host");
}

pinned_pages::~pinned_pages() {
  driver_->cuMemHostUnregister(where_);
  ::munmap(where_, bytes_);
}

}  // namespace sluice::bench
