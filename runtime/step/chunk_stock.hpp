/// Chunks that a training job has and nothing uses: what the pool has granted, what arena and persistent
/// memory do not need any more. From here they are mapped into either, or handed to the server.
///
///   stock.collect();   // what the pool has granted
///   if (stock.size() >= 3) {
///     stock.map_into(arena, 3, lifetime::revocable);
///   }
///   stock.add(arena.shrink(2));
///
/// Lasting memory gets what lies nearest to the pool's end, revocable memory what lies farthest from it,
/// as the ledger's writer grants them, so that the arena stays in one run.
///
/// Thread-safety: none; the owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/ledger/chunk_notes.hpp"

namespace sluice::step {

class chunk_stock {
 public:
  /// Both must outlive this object.
  chunk_stock(memhandover::tenant_client& client, memhandover::device_memory& memory);

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(chunks_.size());
  }
  [[nodiscard]] std::span<std::uint32_t const> chunks() const noexcept { return chunks_; }
  /// How many are missing for `needed`.
  [[nodiscard]] std::uint32_t missing(std::uint32_t needed) const noexcept {
    return needed > size() ? needed - size() : 0;
  }
  /// How many of the pool's free chunks lie nearer to its end than what is here, among the `needed`
  /// chunks that lie nearest.
  [[nodiscard]] std::uint32_t better_in_pool(std::uint32_t needed) const;
  /// Whether a chunk here lies nearer to the pool's end than one of `others`.
  [[nodiscard]] bool beats(std::span<std::uint32_t const> others) const;

  void add(std::span<std::uint32_t const> chunks) noexcept;
  /// Adds what the pool has granted since the last call.
  void collect();
  /// Takes these out, ascending, which are here.
  void remove(std::span<std::uint32_t const> chunks) noexcept;
  /// Takes `count` of them out, no more than there are, for lasting memory. Their contents may be another's.
  [[nodiscard]] std::vector<std::uint32_t> take(std::uint32_t count);
  void clear() noexcept { chunks_.clear(); }

  /// Maps `count` of them, no more than there are, behind what `where` has, zeroed where they hold
  /// another's contents. Throws as `chunk_space::grow` does; then they are here again.
  void map_into(memhandover::chunk_space& where, std::uint32_t count, memhandover::lifetime kind);

 private:
  void scrub(std::byte* at, std::span<std::uint32_t const> chunks, bool all);

  memhandover::tenant_client& client_;
  memhandover::device_memory& memory_;
  memhandover::chunk_notes notes_;
  std::vector<std::uint32_t> chunks_;  ///< with room for all that there are
  std::vector<bool> needs_scrub_;      ///< by chunk: contents are another's
};

}  // namespace sluice::step
