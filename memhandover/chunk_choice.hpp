/// Which chunks to give away, so that whoever gets them finds neighbours.
#pragma once

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

}  // namespace sluice::memhandover
