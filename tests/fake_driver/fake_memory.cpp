#include "tests/fake_driver/fake_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "tests/fake_driver/fake_stream.hpp"

namespace sluice::fake {
namespace {

constexpr std::size_t granularity = std::size_t{2} << 20U;

enum class area_kind { device, pinned };

struct area {
  std::size_t bytes = 0;
  area_kind kind = area_kind::device;
};

/// One physical allocation; its memory lives as long as a handle or a mapping does.
struct physical {
  int fd = -1;
  std::size_t bytes = 0;
  int handles = 1;
  int mappings = 0;
  bool imported = false;
  CUmemAllocationProp properties{};
};

struct mapping {
  std::size_t bytes = 0;
  physical* of = nullptr;
};

struct memory {
  std::mutex lock;  // guards everything
  std::map<CUdeviceptr, area> areas;
  std::map<CUdeviceptr, std::size_t> reservations;
  std::map<CUdeviceptr, mapping> mappings;
  std::set<physical*> physicals;
  std::size_t used = 0;
};

memory& the_memory() {
  static memory& one = *new memory;  // never freed: threads of streams outlive static objects
  return one;
}

/// The entry of a map of ranges that contains an address.
template <typename Map, typename Size>
auto containing(Map& ranges, CUdeviceptr address, Size size) {
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) {
    return ranges.end();
  }
  --next;
  return address - next->first < size(next->second) ? next : ranges.end();
}

auto area_containing(memory& in, CUdeviceptr address) {
  return containing(in.areas, address, [](area const& one) { return one.bytes; });
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}
CUdeviceptr address_of(void* where) {
  return reinterpret_cast<CUdeviceptr>(where);
}
physical* physical_of(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<physical*>(handle);
}
CUmemGenericAllocationHandle handle_of(physical* one) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(one);
}

void drop_if_unused(memory& in, physical* one) {
  if (one->handles == 0 && one->mappings == 0) {
    if (!one->imported) {
      in.used -= one->bytes;
    }
    ::close(one->fd);
    in.physicals.erase(one);
    delete one;
  }
}

CUresult add_area(CUdeviceptr* out, std::size_t bytes, area_kind kind) {
  if (out == nullptr || bytes == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  if (kind == area_kind::device && bytes > device_memory_bytes() - in.used) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  void* where = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (where == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  in.used += kind == area_kind::device ? bytes : 0;
  in.areas.emplace(address_of(where), area{bytes, kind});
  *out = address_of(where);
  return CUDA_SUCCESS;
}

CUresult remove_area(CUdeviceptr address, area_kind kind) {
  if (address == 0) {
    return CUDA_SUCCESS;
  }
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  if (current_context() == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  wait_for_context(*current_context());  // as the driver does
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found = in.areas.find(address);
  if (found == in.areas.end() || found->second.kind != kind) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  in.used -= kind == area_kind::device ? found->second.bytes : 0;
  ::munmap(pointer(address), found->second.bytes);
  in.areas.erase(found);
  return CUDA_SUCCESS;
}

/// The mappings that fill [address, address + bytes) exactly; empty if they do not.
std::vector<CUdeviceptr> whole_mappings(memory& in, CUdeviceptr address, std::size_t bytes) {
  std::vector<CUdeviceptr> found;
  CUdeviceptr at = address;
  while (at < address + bytes) {
    auto const one = in.mappings.find(at);
    if (one == in.mappings.end() || one->second.bytes > address + bytes - at) {
      return {};
    }
    found.push_back(at);
    at += one->second.bytes;
  }
  return found;
}

CUresult check_properties(std::size_t bytes, CUmemAllocationProp const* wanted) {
  if (wanted == nullptr || bytes == 0 || bytes % granularity != 0 ||
      wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(wanted->location.id)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  return CUDA_SUCCESS;
}

}  // namespace

bool is_pageable(void const* address) {
  if (is_registered(address)) {
    return false;
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const at = reinterpret_cast<CUdeviceptr>(address);
  bool const mapped = containing(in.mappings, at, [](mapping const& one) { return one.bytes; }) !=
                      in.mappings.end();
  return !mapped && area_containing(in, at) == in.areas.end();
}

bool is_unmapped(void const* address, std::size_t bytes) {
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const end = reinterpret_cast<CUdeviceptr>(address) + bytes;
  for (auto at = reinterpret_cast<CUdeviceptr>(address); at < end; at += granularity) {
    bool const reserved = containing(in.reservations, at, [](std::size_t size) { return size; }) !=
                          in.reservations.end();
    bool const mapped = containing(in.mappings, at, [](mapping const& one) { return one.bytes; }) !=
                        in.mappings.end();
    if (reserved && !mapped) {
      return true;
    }
  }
  return false;
}

}  // namespace sluice::fake

using namespace sluice::fake;

namespace {

template <typename Count>
std::uint64_t counted(Count count) {
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  return count(in);
}

}  // namespace

extern "C" {
__attribute__((visibility("default"))) std::uint64_t fake_reservations() {
  return counted([](memory const& in) { return in.reservations.size(); });
}
__attribute__((visibility("default"))) std::uint64_t fake_mappings() {
  return counted([](memory const& in) { return in.mappings.size(); });
}
__attribute__((visibility("default"))) std::uint64_t fake_handles() {
  return counted([](memory const& in) {
    std::uint64_t handles = 0;
    for (physical const* one : in.physicals) {
      handles += static_cast<std::uint64_t>(one->handles);
    }
    return handles;
  });
}
}

SLUICE_FAKE_CALL CUresult cuMemAlloc_v2(CUdeviceptr* out, std::size_t bytes) {
  SLUICE_FAKE_ENTER
  return add_area(out, bytes, area_kind::device);
}

SLUICE_FAKE_CALL CUresult cuMemAllocPitch_v2(CUdeviceptr* out, std::size_t* pitch,
                                             std::size_t width, std::size_t height,
                                             unsigned /*element*/) {
  SLUICE_FAKE_ENTER
  *pitch = (width + 511) / 512 * 512;
  return add_area(out, *pitch * height, area_kind::device);
}

SLUICE_FAKE_CALL CUresult cuMemFree_v2(CUdeviceptr address) {
  SLUICE_FAKE_ENTER
  return remove_area(address, area_kind::device);
}

SLUICE_FAKE_CALL CUresult cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  *free_bytes = device_memory_bytes() - in.used;
  *total_bytes = device_memory_bytes();
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                                  CUdeviceptr address) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found = area_containing(in, address);
  if (found == in.areas.end()) {
    return CUDA_ERROR_NOT_FOUND;
  }
  if (base != nullptr) {
    *base = found->first;
  }
  if (bytes != nullptr) {
    *bytes = found->second.bytes;
  }
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemHostAlloc(void** out, std::size_t bytes, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  CUdeviceptr address = 0;
  CUresult const result = add_area(&address, bytes, area_kind::pinned);
  *out = pointer(address);
  return result;
}

SLUICE_FAKE_CALL CUresult cuMemAllocHost_v2(void** out, std::size_t bytes) {
  SLUICE_FAKE_ENTER
  CUdeviceptr address = 0;
  CUresult const result = add_area(&address, bytes, area_kind::pinned);
  *out = pointer(address);
  return result;
}

SLUICE_FAKE_CALL CUresult cuMemFreeHost(void* where) {
  SLUICE_FAKE_ENTER
  return remove_area(address_of(where), area_kind::pinned);
}

SLUICE_FAKE_CALL CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which,
                                                CUdeviceptr address) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found = area_containing(in, address);
  bool const mapped = containing(in.mappings, address,
                                 [](mapping const& one) { return one.bytes; }) != in.mappings.end();
  if (which != CU_POINTER_ATTRIBUTE_MEMORY_TYPE || (found == in.areas.end() && !mapped)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  bool const is_pinned = !mapped && found->second.kind == area_kind::pinned;
  *static_cast<unsigned*>(out) = is_pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult
cuMemGetAllocationGranularity(std::size_t* out, CUmemAllocationProp const* wanted,
                              CUmemAllocationGranularity_flags /*option*/) {
  SLUICE_FAKE_ENTER
  if (wanted == nullptr || out == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = granularity;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes,
                                      CUmemAllocationProp const* wanted, unsigned long long flags) {
  SLUICE_FAKE_ENTER
  if (CUresult const wrong = check_properties(bytes, wanted); wrong != CUDA_SUCCESS || flags != 0) {
    return wrong != CUDA_SUCCESS ? wrong : CUDA_ERROR_INVALID_VALUE;
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  if (bytes > device_memory_bytes() - in.used) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  int const fd = ::memfd_create("sluice-fake-device-memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto* one = new physical{fd, bytes, 1, 0, false, *wanted};
  in.used += bytes;
  in.physicals.insert(one);
  *out = handle_of(one);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  physical* one = physical_of(handle);
  if (!in.physicals.contains(one) || one->handles == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  --one->handles;
  drop_if_unused(in, one);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemExportToShareableHandle(void* out,
                                                       CUmemGenericAllocationHandle handle,
                                                       CUmemAllocationHandleType type,
                                                       unsigned long long flags) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  physical* one = physical_of(handle);
  bool const exportable =
      in.physicals.contains(one) && !one->imported &&
      (one->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  if (!exportable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int const fd = ::fcntl(one->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *static_cast<int*>(out) = fd;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out,
                                                      void* where) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found =
      containing(in.mappings, address_of(where), [](mapping const& one) { return one.bytes; });
  if (out == nullptr || found == in.mappings.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ++found->second.of->handles;
  *out = handle_of(found->second.of);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemGetHandleForAddressRange(void* out, CUdeviceptr address,
                                                        std::size_t /*bytes*/,
                                                        CUmemRangeHandleType type,
                                                        unsigned long long /*flags*/) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found = containing(in.mappings, address, [](mapping const& one) { return one.bytes; });
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || found == in.mappings.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int const fd = ::fcntl(found->second.of->fd, F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(out) = fd;
  return fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out,
                                                         void* descriptor,
                                                         CUmemAllocationHandleType type) {
  SLUICE_FAKE_ENTER
  auto const given = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  struct stat about {};
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || ::fstat(given, &about) != 0 ||
      about.st_size % static_cast<off_t>(granularity) != 0 || about.st_size == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int const fd = ::fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto* one = new physical{fd, static_cast<std::size_t>(about.st_size), 1, 0, true, {}};
  in.physicals.insert(one);
  *out = handle_of(one);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemAddressReserve(CUdeviceptr* out, std::size_t bytes,
                                              std::size_t alignment, CUdeviceptr /*wish*/,
                                              unsigned long long flags) {
  SLUICE_FAKE_ENTER
  std::size_t const align = alignment == 0 ? granularity : alignment;
  if (out == nullptr || bytes == 0 || bytes % granularity != 0 || flags != 0 ||
      (align & (align - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* where =
      ::mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (where == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  CUdeviceptr const start = address_of(where);
  CUdeviceptr const aligned = (start + align - 1) / align * align;
  if (aligned > start) {
    ::munmap(where, aligned - start);
  }
  if (std::size_t const rest = start + align - aligned; rest > 0) {
    ::munmap(pointer(aligned + bytes), rest);
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  in.reservations.emplace(aligned, bytes);
  *out = aligned;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  auto const found = in.reservations.find(address);
  if (found == in.reservations.end() || found->second != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto const first_mapping = in.mappings.lower_bound(address);
  if (first_mapping != in.mappings.end() && first_mapping->first < address + bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::munmap(pointer(address), bytes);
  in.reservations.erase(found);
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                                   CUmemGenericAllocationHandle handle, unsigned long long flags) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  physical* one = physical_of(handle);
  if (!in.physicals.contains(one) || offset != 0 || flags != 0 || bytes != one->bytes) {
    return CUDA_ERROR_INVALID_VALUE;  // a handle is mapped whole or not at all
  }
  auto const reserved = containing(in.reservations, address, [](std::size_t size) { return size; });
  bool const inside = reserved != in.reservations.end() && address % granularity == 0 &&
                      address + bytes <= reserved->first + reserved->second;
  auto const next = in.mappings.lower_bound(address);
  bool const taken = (next != in.mappings.end() && next->first < address + bytes) ||
                     containing(in.mappings, address, [](mapping const& each) {
                       return each.bytes;
                     }) != in.mappings.end();
  if (!inside || taken) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, one->fd, 0) ==
      MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  ++one->mappings;
  in.mappings.emplace(address, mapping{bytes, one});
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  SLUICE_FAKE_ENTER
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  std::vector<CUdeviceptr> const whole = whole_mappings(in, address, bytes);
  if (whole.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::mmap(pointer(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (CUdeviceptr at : whole) {
    physical* one = in.mappings.at(at).of;
    in.mappings.erase(at);
    --one->mappings;
    drop_if_unused(in, one);
  }
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes,
                                         CUmemAccessDesc const* wanted, std::size_t count) {
  SLUICE_FAKE_ENTER
  if (wanted == nullptr || count == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  memory& in = the_memory();
  std::lock_guard const guard{in.lock};
  if (whole_mappings(in, address, bytes).empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int protection = PROT_NONE;
  for (std::size_t i = 0; i < count; ++i) {
    protection |= wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                  : wanted[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                        : PROT_NONE;
  }
  return ::mprotect(pointer(address), bytes, protection) == 0 ? CUDA_SUCCESS
                                                              : CUDA_ERROR_INVALID_VALUE;
}
