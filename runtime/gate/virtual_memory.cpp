#include "runtime/gate/virtual_memory.hpp"

#include <algorithm>
#include <memory>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"

namespace sluice::gate {
namespace {

/// No driver's handle has this in its upper bits: they are addresses or small numbers.
constexpr std::uint64_t mark = std::uint64_t{0x51ce} << 48U;

std::size_t whole_chunks(std::size_t bytes, std::size_t chunk) noexcept {
  return (bytes + chunk - 1) / chunk * chunk;
}

/// Of a runtime that has pieces; nullptr: the driver answers.
sluice_runtime_api const* runtime_with_pieces() {
  sluice_runtime_api const* const runtime = sharing_runtime();
  return runtime != nullptr && runtime->piece_make != nullptr && !this_thread().exempt ? runtime
                                                                                       : nullptr;
}

/// Plain memory of the shared device, as the pool has it.
bool is_plain(CUmemAllocationProp const& wanted) noexcept {
  return wanted.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         wanted.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         wanted.location.id == sharing_device() && wanted.allocFlags.compressionType == 0 &&
         wanted.allocFlags.usage == 0;
}

bool is_own_access(CUmemAccessDesc const& wanted, int device) noexcept {
  return wanted.location.type == CU_MEM_LOCATION_TYPE_DEVICE && wanted.location.id == device &&
         wanted.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

// The driver's own functions, past the gate.

CUresult driver_map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
  using function = CUresult (*)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                                unsigned long long);
  return real<function>(symbol::of_cuMemMap)(address, bytes, offset, handle, flags);
}

CUresult driver_unmap(CUdeviceptr address, std::size_t bytes) {
  return real<CUresult (*)(CUdeviceptr, std::size_t)>(symbol::of_cuMemUnmap)(address, bytes);
}

CUresult driver_set_access(CUdeviceptr address, std::size_t bytes, CUmemAccessDesc const* wanted,
                           std::size_t count) {
  using function = CUresult (*)(CUdeviceptr, std::size_t, CUmemAccessDesc const*, std::size_t);
  return real<function>(symbol::of_cuMemSetAccess)(address, bytes, wanted, count);
}

CUresult driver_reserve(CUdeviceptr* made, std::size_t bytes, std::size_t alignment,
                        CUdeviceptr wish, unsigned long long flags) {
  using function =
      CUresult (*)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long);
  return real<function>(symbol::of_cuMemAddressReserve)(made, bytes, alignment, wish, flags);
}

CUresult driver_free_addresses(CUdeviceptr address, std::size_t bytes) {
  return real<CUresult (*)(CUdeviceptr, std::size_t)>(symbol::of_cuMemAddressFree)(address, bytes);
}

CUresult driver_release(CUmemGenericAllocationHandle handle) {
  return real<CUresult (*)(CUmemGenericAllocationHandle)>(symbol::of_cuMemRelease)(handle);
}

CUresult give_access(CUdeviceptr address, std::size_t bytes, int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver_set_access(address, bytes, &access, 1);
}

/// Maps memory of the driver's, for a device where it says one. If it fails, nothing is mapped there.
CUresult place(CUmemGenericAllocationHandle made, CUdeviceptr at, std::size_t bytes,
               std::optional<int> accessible_to) {
  CUresult result = driver_map(at, bytes, 0, made, 0);
  if (result == CUDA_SUCCESS && accessible_to) {
    result = give_access(at, bytes, *accessible_to);
    if (result != CUDA_SUCCESS) {
      static_cast<void>(driver_unmap(at, bytes));
    }
  }
  return result;
}

/// Copies what is at `from` into memory that is mapped nowhere.
CUresult fill(CUmemGenericAllocationHandle into, CUdeviceptr from, std::size_t bytes, int device) {
  CUdeviceptr to = 0;
  CUresult result = driver_reserve(&to, bytes, 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    return result;
  }
  result = place(into, to, bytes, device);
  if (result == CUDA_SUCCESS) {
    memory_stays const there{symbol::of_cuMemcpyDtoD_v2};
    using copy = CUresult (*)(CUdeviceptr, CUdeviceptr, std::size_t);
    result = real<copy>(symbol::of_cuMemcpyDtoD_v2)(to, from, bytes);
    // From device to device it may still run when that returns.
    if (result == CUDA_SUCCESS) {
      result = real<CUresult (*)()>(symbol::of_cuCtxSynchronize)();
    }
    static_cast<void>(driver_unmap(to, bytes));
  }
  static_cast<void>(driver_free_addresses(to, bytes));
  return result;
}

}  // namespace

virtual_memory& the_virtual_memory() {
  static virtual_memory& one = *std::make_unique<virtual_memory>().release();
  return one;
}

std::optional<CUresult> virtual_memory::create(handle* made, std::size_t bytes,
                                               CUmemAllocationProp const* wanted,
                                               unsigned long long flags) {
  auto const* const runtime = runtime_with_pieces();
  if (runtime == nullptr || made == nullptr || wanted == nullptr || flags != 0 ||
      !is_plain(*wanted)) {
    return std::nullopt;
  }
  auto const chunk = runtime->chunk_bytes(sharing_device());
  if (chunk == 0 || bytes < chunk) {
    return std::nullopt;
  }
  piece one{.bytes = bytes, .properties = *wanted};
  switch (runtime->piece_make(sharing_device(), &one.of_runtime, bytes)) {
    case SLUICE_ALLOC_OK:
      break;
    case SLUICE_ALLOC_OUT_OF_MEMORY:
      return CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return std::nullopt;
  }
  std::lock_guard const lock{mutex_};
  *made = mark | ++last_;
  pieces_.emplace(*made, one);
  return CUDA_SUCCESS;
}

std::optional<CUresult> virtual_memory::release(handle which) {
  std::lock_guard const lock{mutex_};
  auto const found = pieces_.find(which);
  if (found == pieces_.end()) {
    return std::nullopt;
  }
  if (found->second.references == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  --found->second.references;
  end_if_unused(found);
  return CUDA_SUCCESS;
}

void virtual_memory::end_if_unused(pieces::iterator which) {
  auto& one = which->second;
  if (one.references > 0 || one.at != 0) {
    return;
  }
  if (one.of_runtime != 0) {
    sharing_runtime()->piece_free(one.of_runtime);
  } else {
    static_cast<void>(driver_release(one.of_driver));
  }
  pieces_.erase(which);
}

std::optional<CUresult> virtual_memory::retain(handle* found, CUdeviceptr address) {
  std::lock_guard const lock{mutex_};
  auto const here = mapped_in(address, 1);
  if (here.empty() || found == nullptr) {
    return std::nullopt;
  }
  ++here.front()->second.references;
  *found = here.front()->first;
  return CUDA_SUCCESS;
}

std::optional<CUresult> virtual_memory::properties(CUmemAllocationProp* out, handle which) {
  std::lock_guard const lock{mutex_};
  auto const found = pieces_.find(which);
  if (found == pieces_.end() || out == nullptr) {
    return std::nullopt;
  }
  *out = found->second.properties;
  return CUDA_SUCCESS;
}

/// Whether all chunks of a piece can lie there: where they begin, without covering addresses that the program may yet use.
bool virtual_memory::has_room(CUdeviceptr address, std::size_t bytes, std::size_t chunk) const {
  auto const next = reserved_.upper_bound(address);
  if (next == reserved_.begin() || address % chunk != 0) {
    return false;
  }
  auto const& [base, in] = *std::prev(next);
  return address + whole_chunks(bytes, chunk) <= base + in.bytes &&
         (bytes % chunk == 0 || address + bytes == base + in.asked);
}

std::optional<CUresult> virtual_memory::map(CUdeviceptr address, std::size_t bytes,
                                            std::size_t offset, handle which,
                                            unsigned long long flags) {
  std::lock_guard const lock{mutex_};
  auto const found = pieces_.find(which);
  if (found == pieces_.end()) {
    return std::nullopt;
  }
  auto& one = found->second;
  if (one.of_runtime != 0) {
    auto const* const runtime = sharing_runtime();
    auto const chunk = runtime->chunk_bytes(one.properties.location.id);
    if (offset == 0 && flags == 0 && bytes == one.bytes && one.at == 0 && chunk != 0 &&
        has_room(address, bytes, chunk) &&
        runtime->piece_move(one.of_runtime, address) == SLUICE_ALLOC_OK) {
      one.at = address;
      one.is_accessible = false;
      return CUDA_SUCCESS;
    }
    if (CUresult const result = surrender(one); result != CUDA_SUCCESS) {
      return result;
    }
  }
  return driver_map(address, bytes, offset, one.of_driver, flags);
}

/// Those any part of which lies there, ascending.
std::vector<virtual_memory::pieces::iterator> virtual_memory::mapped_in(CUdeviceptr address,
                                                                        std::size_t bytes) {
  std::vector<pieces::iterator> found;
  for (auto each = pieces_.begin(); each != pieces_.end(); ++each) {
    auto const& one = each->second;
    if (one.at != 0 && one.at < address + bytes && address < one.at + one.bytes) {
      found.push_back(each);
    }
  }
  std::sort(found.begin(), found.end(), [](auto const& first, auto const& second) {
    return first->second.at < second->second.at;
  });
  return found;
}

std::optional<CUresult> virtual_memory::unmap(CUdeviceptr address, std::size_t bytes) {
  std::lock_guard const lock{mutex_};
  auto const here = mapped_in(address, bytes);
  if (here.empty()) {
    return std::nullopt;
  }
  bool const whole = std::all_of(here.begin(), here.end(), [&](auto const& each) {
    return each->second.at >= address && each->second.at + each->second.bytes <= address + bytes;
  });
  if (!whole) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The driver does not wait either, but what is unmapped here may be another's at once.
  wait_for_launches();
  CUresult result = CUDA_SUCCESS;
  auto at = address;
  for (auto const& each : here) {
    auto& one = each->second;
    if (one.at > at && result == CUDA_SUCCESS) {
      result = driver_unmap(at, one.at - at);
    }
    at = one.at + one.bytes;
    if (sharing_runtime()->piece_move(one.of_runtime, 0) != SLUICE_ALLOC_OK) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    one.at = 0;
    end_if_unused(each);
  }
  return result == CUDA_SUCCESS && at < address + bytes ? driver_unmap(at, address + bytes - at)
                                                        : result;
}

std::optional<CUresult> virtual_memory::set_access(CUdeviceptr address, std::size_t bytes,
                                                   CUmemAccessDesc const* wanted,
                                                   std::size_t count) {
  std::lock_guard const lock{mutex_};
  auto const here = mapped_in(address, bytes);
  if (here.empty() || wanted == nullptr || count == 0) {
    return std::nullopt;
  }
  auto const device = here.front()->second.properties.location.id;
  bool const is_own = std::all_of(wanted, wanted + count, [device](CUmemAccessDesc const& each) {
    return is_own_access(each, device);
  });
  if (!is_own) {
    for (auto const& each : here) {
      if (CUresult const result = surrender(each->second); result != CUDA_SUCCESS) {
        return result;
      }
    }
    return driver_set_access(address, bytes, wanted, count);
  }
  auto at = address;
  for (auto const& each : here) {
    auto& one = each->second;
    if (one.at > at) {
      if (CUresult const result = driver_set_access(at, one.at - at, wanted, count);
          result != CUDA_SUCCESS) {
        return result;
      }
    }
    one.is_accessible = true;
    at = std::max(at, one.at + one.bytes);
  }
  return at < address + bytes ? driver_set_access(at, address + bytes - at, wanted, count)
                              : CUDA_SUCCESS;
}

CUresult virtual_memory::surrender(handle& which) {
  std::lock_guard const lock{mutex_};
  auto const found = pieces_.find(which);
  if (found == pieces_.end()) {
    return CUDA_SUCCESS;
  }
  CUresult const result = found->second.of_runtime != 0 ? surrender(found->second) : CUDA_SUCCESS;
  which = found->second.of_driver;
  return result;
}

/// If it fails, the piece is what it was.
CUresult virtual_memory::surrender(piece& one) {
  using create_function =
      CUresult (*)(handle*, std::size_t, CUmemAllocationProp const*, unsigned long long);
  handle made = 0;
  CUresult result =
      real<create_function>(symbol::of_cuMemCreate)(&made, one.bytes, &one.properties, 0);
  if (result != CUDA_SUCCESS) {
    return result;
  }
  auto const device = one.properties.location.id;
  if (one.at != 0) {
    wait_for_launches();
    result = one.is_accessible ? fill(made, one.at, one.bytes, device) : CUDA_SUCCESS;
  }
  auto const* const runtime = sharing_runtime();
  if (result == CUDA_SUCCESS && one.at != 0) {
    result = runtime->piece_move(one.of_runtime, 0) == SLUICE_ALLOC_OK
                 ? place(made, one.at, one.bytes,
                         one.is_accessible ? std::optional{device} : std::nullopt)
                 : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
      static_cast<void>(runtime->piece_move(one.of_runtime, one.at));
    }
  }
  if (result != CUDA_SUCCESS) {
    static_cast<void>(driver_release(made));
    return result;
  }
  runtime->piece_free(one.of_runtime);
  one.of_runtime = 0;
  one.of_driver = made;
  one.at = 0;  // the mapping is the driver's
  return CUDA_SUCCESS;
}

std::optional<CUresult> virtual_memory::reserve(CUdeviceptr* made, std::size_t bytes,
                                                std::size_t alignment, CUdeviceptr wish,
                                                unsigned long long flags) {
  auto const* const runtime = runtime_with_pieces();
  auto const chunk = runtime != nullptr ? runtime->chunk_bytes(sharing_device()) : 0;
  if (chunk == 0 || bytes < chunk || wish != 0 || made == nullptr) {
    return std::nullopt;
  }
  auto const more = whole_chunks(bytes, chunk);
  if (driver_reserve(made, more, std::max(alignment, chunk), 0, flags) != CUDA_SUCCESS) {
    return std::nullopt;
  }
  std::lock_guard const lock{mutex_};
  reserved_.insert_or_assign(*made, reservation{bytes, more});
  return CUDA_SUCCESS;
}

std::optional<CUresult> virtual_memory::free_addresses(CUdeviceptr address, std::size_t bytes) {
  std::lock_guard const lock{mutex_};
  auto const found = reserved_.find(address);
  if (found == reserved_.end()) {
    return std::nullopt;
  }
  if (bytes != found->second.asked || !mapped_in(address, bytes).empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUresult const result = driver_free_addresses(address, found->second.bytes);
  if (result == CUDA_SUCCESS) {
    reserved_.erase(found);
  }
  return result;
}

}  // namespace sluice::gate
