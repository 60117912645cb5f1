/// Which chunks to give away and which to take, so that whoever gets them finds neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace sluice::memhandover {

/// Whether each is the one behind its predecessor: then they lie together in the whole view.
[[nodiscard]] bool are_neighbours(std::span<std::uint32_t const> chunks) noexcept;

/// At least `missing` chunks of `own` (all of them, if these are fewer). `free[i]` tells that the
/// taker has chunk i already; with those and what is returned it finds `missing` + (number of free
/// ones) neighbours, if any choice makes that possible. Then the choice is the one that gives least,
/// of these the lowest, and it may give more than `missing`; else it is the lowest `missing`.
/// `own` and what is returned are in ascending order. Linear in `free.size()`, the pool's chunks.
[[nodiscard]] std::vector<std::uint32_t> choose_chunks_to_give(std::span<std::uint32_t const> own,
                                                               std::vector<bool> const& free,
                                                               std::uint32_t missing);

/// Up to `count` of those of a pool's `total` chunks that `is_free(chunk)` holds for, ascending: the
/// shortest run that is long enough, else the lowest.
template <typename IsFree>
[[nodiscard]] std::vector<std::uint32_t> choose_chunks_to_take(std::uint32_t total,
                                                               std::uint32_t count,
                                                               IsFree&& is_free) {
  std::uint32_t best_start = 0;
  std::uint32_t best_length = 0;
  for (std::uint32_t start = 0; start < total;) {
    std::uint32_t end = start;
    while (end < total && is_free(end)) {
      ++end;
    }
    auto const length = end - start;
    if (length >= count && (best_length == 0 || length < best_length)) {
      best_start = start;
      best_length = length;
    }
    start = end + 1;
  }
  std::vector<std::uint32_t> taken;
  taken.reserve(std::min(count, total));
  for (std::uint32_t i = best_start; i < total && taken.size() < count; ++i) {
    if (is_free(i)) {
      taken.push_back(i);
    }
  }
  return taken;
}

}  // namespace sluice::memhandover
