/// An allocator over one address range that chunks are mapped into, from its beginning on without
/// gaps.
///
///   empty ──grow──► mapped ──revoke──► revoked     addresses stay reserved; what still lives there
///           ◄─shrink─                              reads zeros on the host and faults on CUDA
///
/// Thread-safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memhandover/device_memory.hpp"
#include "memhandover/range_allocator.hpp"

namespace sluice::memhandover {

class chunk_space {
 public:
  /// What lies behind a mapped chunk. `process`, on the host only: private pages of this process
  /// stand for the chunk, whose own memory stays a hole meanwhile, so that `fork` has its usual
  /// copy-on-write meaning.
  enum class backing { pool, process };

  /// Reserves addresses for `capacity` chunks. `memory` must outlive this object.
  chunk_space(device_memory& memory, std::uint32_t capacity, std::size_t alignment, backing behind);
  chunk_space(chunk_space const&) = delete;
  chunk_space& operator=(chunk_space const&) = delete;
  ~chunk_space();

  /// Address of at least `bytes`, or null if they do not fit into what is mapped.
  [[nodiscard]] std::byte* allocate(std::size_t bytes);
  /// Frees an allocation; returns its size, 0 if `address` is none.
  std::size_t free(std::byte* address);
  [[nodiscard]] bool contains(void const* address) const noexcept;

  /// How many more chunks would make `bytes` fit.
  [[nodiscard]] std::uint32_t chunks_needed(std::size_t bytes) const;
  [[nodiscard]] std::uint32_t room() const noexcept {
    return capacity_ - static_cast<std::uint32_t>(chunks_.size());
  }
  /// Maps chunks behind the ones there are. If it throws, nothing has changed.
  void grow(std::span<std::uint32_t const> chunks);
  /// Chunks at the end in which nothing lives.
  [[nodiscard]] std::uint32_t idle_chunks() const;
  /// Unmaps up to `count` of them and returns them.
  [[nodiscard]] std::vector<std::uint32_t> shrink(std::uint32_t count);
  /// Takes all memory away although it may be in use, and returns the chunks. `unmap_now` false
  /// leaves the mappings for `finish_revoke`, for a caller who has made sure that nothing runs.
  [[nodiscard]] std::vector<std::uint32_t> revoke(bool unmap_now);
  void finish_revoke();

  [[nodiscard]] range_allocator const& ranges() const noexcept { return ranges_; }
  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  [[nodiscard]] std::span<std::uint32_t const> chunks() const noexcept { return chunks_; }
  [[nodiscard]] bool revoked() const noexcept { return revoked_; }
  [[nodiscard]] bool awaits_unmapping() const noexcept { return left_mapped_ > 0; }
  [[nodiscard]] bool holds_private_pages() const noexcept { return behind_ == backing::process; }

 private:
  device_memory& memory_;
  std::uint32_t capacity_;
  backing behind_;
  std::byte* base_;
  range_allocator ranges_;
  std::vector<std::uint32_t> chunks_;  ///< mapped at base_ + i × chunk_bytes
  std::uint32_t left_mapped_ = 0;      ///< chunks that a revoke has left for `finish_revoke`
  std::uint32_t private_pages_ = 0;  ///< chunks' worth of private pages that a revoke has put there
  bool revoked_ = false;
};

}  // namespace sluice::memhandover
