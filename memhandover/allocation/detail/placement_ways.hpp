/// The two ways to place a load; tensor_placement.hpp says what they do. Each returns false if the
/// tensors do not fit; the draft is then to be dropped.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memhandover/allocation/detail/placement_draft.hpp"

namespace sluice::memhandover::detail {

/// What becomes of the ends of runs that no tensor fits: they may stay holes, or a tensor is stitched
/// across each of them.
enum class gaps { left, closed };

/// `tensors` from the largest on; `offered` ascending. With `closed` it fits whenever the bytes do.
[[nodiscard]] bool place_tidily(placement_draft& draft, std::vector<wanted_tensor> tensors,
                                std::span<std::uint32_t const> offered, gaps what);
[[nodiscard]] bool place_tightly(placement_draft& draft, std::vector<wanted_tensor> const& tensors,
                                 std::span<std::uint32_t const> offered);

}  // namespace sluice::memhandover::detail
