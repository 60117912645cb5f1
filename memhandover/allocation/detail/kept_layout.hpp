/// Where the tensors of a published model lie, as bytes that a successor reads: what a model's memory holds is
/// worth nothing without it.
///
///   auto const blob = pack({"resnet50", sizes, decision.tensors, decision.stitched});
///   auto const layout = unpack(blob);   // nothing: not what `pack` writes
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/allocation/tensor_placement.hpp"

namespace sluice::memhandover::detail {

struct kept_layout {
  std::string tag;                   ///< which contents these are; whoever publishes says
  std::vector<std::uint64_t> sizes;  ///< of the tensors, in bytes
  std::vector<tensor_spot> tensors;  ///< as many
  std::vector<std::vector<std::uint32_t>> stitched;  ///< chunks of each range
};

[[nodiscard]] std::vector<std::byte> pack(kept_layout const& layout);
/// Trusts nothing: whatever the bytes are, nothing is read beyond them.
[[nodiscard]] std::optional<kept_layout> unpack(std::span<std::byte const> bytes);

/// The bytes of the whole view that it names, each tensor rounded up to `alignment`; nothing if it names
/// a chunk that is not among `chunks` (ascending), or one byte for two tensors.
[[nodiscard]] std::optional<std::vector<extent>> extents_of(kept_layout const& layout,
                                                            std::span<std::uint32_t const> chunks,
                                                            std::uint64_t chunk_bytes,
                                                            std::uint64_t alignment);

}  // namespace sluice::memhandover::detail
