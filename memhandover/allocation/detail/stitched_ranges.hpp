/// Ranges of stitched chunks: in use, or kept for the next load that wants the same chunks in the same
/// order.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

#include "memhandover/client/chunk_pool.hpp"

namespace sluice::memhandover::detail {

/// All functions may be called from any thread; no lock is held while memory is mapped.
class stitched_ranges {
 public:
  struct range {
    std::vector<std::uint32_t> chunks;
    std::byte* data = nullptr;
    bool was_kept = false;  ///< `get` found it mapped
  };

  explicit stitched_ranges(chunk_pool& pool) : pool_(pool) {}
  stitched_ranges(stitched_ranges const&) = delete;
  stitched_ranges& operator=(stitched_ranges const&) = delete;
  ~stitched_ranges() { trim(0); }

  /// A range of these chunks, for one user. Throws as `chunk_pool::stitch` does.
  [[nodiscard]] range get(std::vector<std::uint32_t> const& chunks);
  /// Keeps a range that nobody uses any more; without memory for that it is unmapped.
  void keep(range unused) noexcept;
  [[nodiscard]] bool keeps(std::vector<std::uint32_t> const& chunks) const;
  /// Unmaps kept ranges, the longest kept first, until they map at most `most_chunks`.
  void trim(std::uint32_t most_chunks) noexcept;

 private:
  chunk_pool& pool_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::list<range> kept_;     ///< the longest kept first
  std::uint64_t kept_chunks_ = 0;
};

}  // namespace sluice::memhandover::detail
