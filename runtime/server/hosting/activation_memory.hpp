/// Memory that computations need while they run, out of the pool: what is not there is refused, and not taken from the host
/// or the device besides.
///
///   activation_memory memory{pool, activation_memory::freed::kept};
///   auto* const address = memory.allocate(20_MiB);  // may take chunks from training
///   memory.free(address);
///   memory.give_back();  // what was kept for the next computation
///
/// Small allocations share chunks, large ones are stitched of several (memhandover/allocation/tensor_heap.hpp). The chunks are
/// the server's, end with its process, and are never published.
///
/// Thread-safety: all members may be called from any thread; allocations that need chunks wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "memhandover/allocation/tensor_heap.hpp"

namespace sluice::server {

class activation_memory {
 public:
  /// What becomes of freed memory: kept until `give_back`, for who asks without a cache of his own, or given back at once.
  enum class freed { kept, given_back };

  activation_memory(std::shared_ptr<memhandover::serving_pool> pool, freed then);

  /// Aligned to 512 bytes. Throws `out_of_memory` if the pool cannot have so much, `deadline_exceeded` if training
  /// does not answer.
  [[nodiscard]] std::byte* allocate(std::uint64_t bytes);
  /// False if nothing was allocated there.
  bool free(std::byte const* address) noexcept;

  struct extent {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
  };
  /// The allocation that the address lies in.
  [[nodiscard]] std::optional<extent> containing(std::byte const* address) const;

  /// False if nothing was kept, or an allocation takes chunks at this moment.
  bool give_back();

  /// Of what would be given back.
  [[nodiscard]] std::uint64_t kept_bytes() const;
  [[nodiscard]] memhandover::serving_pool const& pool() const noexcept { return *pool_; }

 private:
  struct piece {
    memhandover::loaded_tensors memory;
    std::uint64_t bytes = 0;  ///< as asked for

    [[nodiscard]] std::byte* at() const noexcept { return memory.addresses().front(); }
  };

  bool empty_kept();
  [[nodiscard]] std::optional<piece> take_kept(std::uint64_t bytes);
  [[nodiscard]] piece obtain(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t live_bytes() const;

  std::shared_ptr<memhandover::serving_pool> const pool_;
  bool const keeps_;
  memhandover::tensor_heap heap_;
  /// Before the other. Who finds too little gives back what is kept: nobody else does meanwhile, whose pieces would be neither
  /// kept nor free.
  std::mutex obtaining_;
  mutable std::mutex mutex_;  ///< guards the rest
  std::map<std::byte const*, piece> live_;
  std::multimap<std::uint64_t, piece> kept_;  ///< by size
};

}  // namespace sluice::server
