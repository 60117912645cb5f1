/// An allocator over one address range that chunks are mapped into, from its beginning on without
/// gaps.
///
///   empty ──grow──► mapped ──revoke──► revoked     addresses stay reserved; what still lives there
///           ◄─shrink─  │                           reads zeros on the host and faults on CUDA
///                      └───close──► closed         what lives stays until it is freed; nothing is added
///
/// Work that will be thrown away may go on allocating: `allocate_unbacked` hands out addresses that
/// nothing was ever mapped at.
///
/// A position whose contents are kept elsewhere can be *parked*: its chunk is gone, its addresses and what is
/// allocated there stay. Until another chunk comes there an access faults. A space with parked positions
/// neither grows nor shrinks.
///
/// Of private pages the owner sees to that: they are neither unmapped nor mapped.
///
/// Thread-safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/allocation/range_allocator.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/chunk_history.hpp"

namespace sluice::memhandover {

class chunk_space {
 public:
  /// What lies behind a mapped chunk. `process`, on the host only: private pages of this process
  /// stand for the chunk, whose own memory stays a hole meanwhile, so that `fork` has its usual
  /// copy-on-write meaning.
  enum class backing { pool, process };

  /// Reserves addresses for `capacity` chunks, and for `unbacked` more that never get memory.
  /// `memory` must outlive this object.
  chunk_space(device_memory& memory, std::uint32_t capacity, std::size_t alignment, backing behind,
              std::uint32_t unbacked = 0);
  chunk_space(chunk_space const&) = delete;
  chunk_space& operator=(chunk_space const&) = delete;
  ~chunk_space();

  /// From now on tells what becomes of this memory, under `name` and `generation`. `history` must
  /// outlive this object.
  void record_in(chunk_history& history, std::string_view name, std::uint64_t generation);

  /// Address of at least `bytes`, or null if they do not fit into what is mapped.
  [[nodiscard]] std::byte* allocate(std::size_t bytes);
  /// The same, but where that would be null an address without memory behind it, until no addresses
  /// are left. From the first call on the space cannot `grow` any more.
  [[nodiscard]] std::byte* allocate_unbacked(std::size_t bytes);
  [[nodiscard]] bool unbacked() const noexcept { return beyond_ > 0; }
  /// Frees an allocation; returns its size, 0 if `address` is none.
  std::size_t free(std::byte* address) noexcept;
  [[nodiscard]] bool contains(void const* address) const noexcept;

  /// How many more chunks would make `bytes` fit; more than the capacity if it never could.
  [[nodiscard]] std::uint32_t chunks_needed(std::size_t bytes) const;
  [[nodiscard]] std::uint32_t room() const noexcept {
    return unbacked() || closed_ || parked_ > 0
               ? 0
               : capacity_ - static_cast<std::uint32_t>(chunks_.size());
  }
  /// Maps chunks behind the ones there are. If it throws, nothing has changed.
  void grow(std::span<std::uint32_t const> chunks);
  /// Chunks at the end in which nothing lives; none while positions are parked.
  [[nodiscard]] std::uint32_t idle_chunks() const;
  enum class unmapping { whole, soon };
  /// Unmaps up to `count` of them and returns them; `soon` leaves work to `device_memory::sweep`. If it throws, here or
  /// in `close`, for want of memory, nothing has changed.
  [[nodiscard]] std::vector<std::uint32_t> shrink(std::uint32_t count,
                                                  unmapping how = unmapping::whole);
  struct unused_memory {
    std::uint32_t chunks = 0;       ///< in which nothing lives, wherever they lie
    std::uint64_t other_bytes = 0;  ///< free in the rest
    bool operator==(unused_memory const&) const = default;
  };
  [[nodiscard]] unused_memory unused() const;
  /// Unmaps every chunk in which nothing lives, and returns them, ascending by address. From then on nothing
  /// is allocated here any more; called again, it does the same with what has been freed since. Not for a
  /// space that is revoked, or has given out addresses without memory.
  [[nodiscard]] std::vector<std::uint32_t> close();
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  /// Takes all memory away although it may be in use: `chunks()` is empty then. `unmap_now` false
  /// leaves the mappings for `finish_revoke`, for a caller who has made sure that nothing runs. If it
  /// throws, nothing has changed.
  void revoke(bool unmap_now);
  void finish_revoke() noexcept;

  /// Maps its chunks at addresses that somebody else has reserved, or for null where they were at first, and nowhere else. All of its
  /// capacity must be there, none parked, and nothing use it. If it throws, nothing has changed.
  void move_to(std::byte* where);

  // --- parking; not of a space that is revoked
  /// Positions that have a chunk, ascending: those in which something lives, or those in which nothing does.
  [[nodiscard]] std::vector<std::uint32_t> positions(bool in_use) const;
  [[nodiscard]] bool is_in_use(std::uint32_t position) const { return !is_unused(position); }
  /// Of a position that has one.
  [[nodiscard]] std::uint32_t chunk_at(std::uint32_t position) const noexcept {
    return chunks_[position];
  }
  [[nodiscard]] std::byte* at(std::uint32_t position) const noexcept {
    return base_ + position * memory_.shape().chunk_bytes;
  }
  /// Unmaps the chunks from there on, as many as `chunks` is to have, none of which is parked; private pages stay mapped. No event is
  /// recorded if there is no memory for it.
  void park(std::uint32_t first, std::span<std::uint32_t> chunks) noexcept;
  /// Maps chunks at parked positions that follow each other, from `first` on, unless private pages are there. If it throws, nothing has changed.
  void unpark(std::uint32_t first, std::span<std::uint32_t const> chunks);
  [[nodiscard]] std::uint32_t parked() const noexcept { return parked_; }

  [[nodiscard]] range_allocator const& ranges() const noexcept { return ranges_; }
  [[nodiscard]] std::byte* base() const noexcept { return base_; }
  /// By position; not of a closed space, nor of one with parked positions.
  [[nodiscard]] std::span<std::uint32_t const> chunks() const noexcept { return chunks_; }
  [[nodiscard]] std::uint32_t mapped_chunks() const noexcept {
    return static_cast<std::uint32_t>(chunks_.size()) - gaps_ - parked_;
  }
  /// From the first address to the end of the last chunk that was mapped.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return chunks_.size() * memory_.shape().chunk_bytes;
  }
  [[nodiscard]] bool revoked() const noexcept { return revoked_; }
  /// Not all of what lives here has memory: the work that it is for must be thrown away.
  [[nodiscard]] bool is_lost() const noexcept { return revoked() || unbacked(); }
  [[nodiscard]] bool awaits_unmapping() const noexcept { return !left_mapped_.empty(); }
  [[nodiscard]] bool holds_private_pages() const noexcept { return behind_ == backing::process; }

 private:
  /// In the place of a chunk that `close` has unmapped.
  static constexpr std::uint32_t no_chunk = ~std::uint32_t{0};
  /// In the place of one that is parked.
  static constexpr std::uint32_t parked_chunk = no_chunk - 1;

  enum class which { all, unused };
  [[nodiscard]] bool is_unused(std::size_t position) const;
  template <typename Each>
  void for_each_run(which wanted, Each const& each) const;
  void record_event(chunk_event kind, std::span<std::uint32_t const> chunks,
                    std::byte const* at) const noexcept;

  device_memory& memory_;
  std::uint32_t capacity_;
  std::uint32_t reserved_;  ///< capacity, and what never gets memory
  backing behind_;
  std::byte* home_;  ///< its own reservation
  std::byte* base_;
  range_allocator ranges_;
  std::vector<std::uint32_t> chunks_;       ///< mapped at base_ + i × chunk_bytes
  std::vector<std::uint32_t> left_mapped_;  ///< chunks that a revoke has left for `finish_revoke`
  std::uint32_t private_pages_ = 0;  ///< chunks' worth of private pages that a revoke has put there
  std::uint32_t beyond_ = 0;         ///< chunks' worth of addresses that may be allocated unbacked
  std::uint32_t gaps_ = 0;           ///< positions that hold `no_chunk`
  std::uint32_t parked_ = 0;         ///< positions that hold `parked_chunk`
  bool revoked_ = false;
  bool closed_ = false;
  chunk_history* history_ = nullptr;
  std::string name_;
  std::uint64_t generation_ = 0;
};

}  // namespace sluice::memhandover
