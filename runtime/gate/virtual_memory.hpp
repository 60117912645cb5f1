/// Memory that a program makes by cuMemCreate and maps itself, out of the pool: what it makes is a piece of the runtime's, which is
/// mapped at the addresses that the program has reserved.
///
///   cuMemCreate ──► nowhere ──cuMemMap──► at the program's addresses ──cuMemUnmap──► nowhere ──cuMemRelease──► gone
///                      └──────── surrendered ◄───────┘   memory of the driver's, with the same contents
///
/// Pool memory can change its owner, comes in chunks, and is mapped once. So a piece is surrendered where a program exports it,
/// binds it to a multicast object, gives another device access, or maps it where a chunk does not fit; and what is smaller than
/// a chunk is the driver's from the beginning. A reservation is made larger than the program asks for where that makes its last
/// chunk fit.
///
/// Handles of pieces are the gate's own: no other function of the driver takes one. Thread-safe.
#pragma once

#include "runtime/gate/driver.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "abi/gate_api.h"

namespace sluice::gate {

class virtual_memory {
 public:
  using handle = CUmemGenericAllocationHandle;

  // Each answers a call of the driver; nothing: the driver has to.
  [[nodiscard]] std::optional<CUresult> create(handle* made, std::size_t bytes,
                                               CUmemAllocationProp const* wanted,
                                               unsigned long long flags);
  [[nodiscard]] std::optional<CUresult> release(handle which);
  [[nodiscard]] std::optional<CUresult> retain(handle* found, CUdeviceptr address);
  [[nodiscard]] std::optional<CUresult> properties(CUmemAllocationProp* out, handle which);
  [[nodiscard]] std::optional<CUresult> map(CUdeviceptr address, std::size_t bytes,
                                            std::size_t offset, handle which,
                                            unsigned long long flags);
  [[nodiscard]] std::optional<CUresult> unmap(CUdeviceptr address, std::size_t bytes);
  [[nodiscard]] std::optional<CUresult> set_access(CUdeviceptr address, std::size_t bytes,
                                                   CUmemAccessDesc const* wanted,
                                                   std::size_t count);

  /// Makes a piece the driver's memory. `which` is then the driver's handle; one that stands for no piece stays what it is.
  [[nodiscard]] CUresult surrender(handle& which);

  [[nodiscard]] std::optional<CUresult> reserve(CUdeviceptr* made, std::size_t bytes,
                                                std::size_t alignment, CUdeviceptr wish,
                                                unsigned long long flags);
  [[nodiscard]] std::optional<CUresult> free_addresses(CUdeviceptr address, std::size_t bytes);

 private:
  struct piece {
    std::uint64_t of_runtime = 0;  ///< 0: it has been surrendered
    handle of_driver = 0;          ///< since then
    std::size_t bytes = 0;
    CUmemAllocationProp properties{};
    unsigned references = 1;  ///< of the program; memory that is mapped stays without any
    CUdeviceptr at = 0;       ///< 0: nowhere, or surrendered
    bool is_accessible = false;
  };
  struct reservation {
    std::size_t asked = 0;
    std::size_t bytes = 0;
  };
  using pieces = std::map<handle, piece>;

  [[nodiscard]] std::vector<pieces::iterator> mapped_in(CUdeviceptr address, std::size_t bytes);
  [[nodiscard]] bool has_room(CUdeviceptr address, std::size_t bytes, std::size_t chunk) const;
  [[nodiscard]] CUresult surrender(piece& one);
  void end_if_unused(pieces::iterator which);

  std::mutex mutex_;
  pieces pieces_;
  std::map<CUdeviceptr, reservation> reserved_;  ///< by this process, while it shares
  std::uint64_t last_ = 0;
};

[[nodiscard]] virtual_memory& the_virtual_memory();

}  // namespace sluice::gate
