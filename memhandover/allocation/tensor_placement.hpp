/// Where the tensors of many models lie in a pool's chunks, so that few bytes are wasted and a model
/// that goes leaves whole chunks empty.
///
///   tensor_placement places{64_MiB, 2000, 256};
///   auto where = places.load(7, sizes, free_chunks);   // nothing: no room, nothing has changed
///   where->taken;                   // of `free_chunks`: now the model's
///   where->tensors[3];              // in the whole view, or in a stitched range
///   auto gone = places.unload(7);   // gone.emptied: back to the pool
///
/// A chunk is *offered* (the caller may have it) → *held* (at least one live byte) → given back. In
/// the *whole view* chunk i lies at i × chunk_bytes, so that a tensor may lie across neighbours. Where
/// there are none, chunks are *stitched*: mapped whole, a second time, one after the other, for one
/// tensor.
///
/// How a load is placed, all or nothing:
///
///   tidy   Tensors from the largest on fill runs of offered chunks, the shortest run that holds all
///          of them, else the longest. What is less than a chunk in the end, the smallest tensors,
///          goes to one hole of a shared chunk, if need be to a few; else it opens a chunk, which
///          others may share. A run's end that no tensor fits is left to later loads, or once such
///          holes exceed 1/128 of what is held, a tensor is stitched across. One that is larger than
///          the longest run is stitched from the shortest ones.
///   dense  If too few chunks are offered for that: the same, but with a tensor stitched across every
///          run's end. Needs no more chunks than the bytes fill, wherever they lie.
///   tight  If there are not even so many: the largest free extent, of held and of offered chunks
///          alike, is filled with what it holds, then the next; a tensor that is larger than all is
///          stitched from the end of one chunk, whole ones, and the beginning of another.
///
/// Pure: values in, decisions out, no memory, no clock. A copy is another state, for trying a load
/// out. Thread-safety: none. A load takes O(n log n) time in its tensors and is linear in the runs
/// offered.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/allocation/chunk_map.hpp"

namespace sluice::memhandover {

/// Where one tensor lies, contiguously.
struct tensor_spot {
  static constexpr std::uint32_t whole_view = 0xffffffff;
  std::uint32_t range = whole_view;  ///< index in `load_decision::stitched`, or the whole view
  std::uint64_t offset = 0;          ///< from the beginning of that
};

/// What a tensor takes: its bytes, 0 as well, rounded up to a multiple of `alignment`, a power of two.
[[nodiscard]] constexpr std::uint64_t rounded_to(std::uint64_t alignment,
                                                 std::uint64_t bytes) noexcept {
  // Without a division, which would be felt on a request's path.
  return ((bytes == 0 ? 1 : bytes) + alignment - 1) & ~(alignment - 1);
}

enum class placing_way : std::uint8_t { tidy, dense, tight };

struct load_decision {
  std::vector<tensor_spot> tensors;                  ///< in the order of the sizes
  std::vector<std::uint32_t> taken;                  ///< of those offered, ascending
  std::vector<std::vector<std::uint32_t>> stitched;  ///< chunks of each range, in its order
  std::vector<std::uint32_t> touched;  ///< all chunks that the model lies in, ascending
  placing_way way = placing_way::tidy;
};

struct unload_decision {
  std::vector<std::uint32_t> emptied;  ///< hold nothing any more, ascending
  std::vector<std::uint32_t> kept;     ///< others of the model's chunks, where others still live
};

class tensor_placement {
 public:
  /// Every tensor starts at a multiple of `alignment`, a power of two that divides `chunk_bytes`;
  /// sizes are rounded up to one, 0 as well. Throws `invalid_argument` for other alignments, and
  /// for a pool without chunks.
  tensor_placement(std::uint64_t chunk_bytes, std::uint32_t chunk_count, std::uint64_t alignment);

  /// Places the tensors of a model. `offered`: chunks that nobody holds, ascending. The ways are tried
  /// in their order up to `last`. Returns nothing if the tensors do not fit. Throws `invalid_argument` for a model that is loaded, and for chunks that
  /// are held, do not exist or are out of order.
  [[nodiscard]] std::optional<load_decision> load(model_id model,
                                                  std::span<std::uint64_t const> sizes,
                                                  std::span<std::uint32_t const> offered,
                                                  residence lasts = residence::passing,
                                                  placing_way last = placing_way::tight);
  /// Takes a model's tensors for placed where they lie already. Returns false, and changes nothing, if one
  /// of these bytes is live or does not exist. `where` has no byte twice. Throws `invalid_argument` for a
  /// model that is loaded.
  [[nodiscard]] bool restore(model_id model, std::span<extent const> where, residence lasts);
  /// Frees what the model has. Throws `not_found` if it is not loaded.
  unload_decision unload(model_id model);
  [[nodiscard]] bool has(model_id model) const { return models_.contains(model); }

  /// With so many chunks offered, wherever they lie, a load of these sizes succeeds.
  [[nodiscard]] std::uint32_t chunks_that_suffice(std::span<std::uint64_t const> sizes) const;

  /// Models that have something in the chunk, in the order in which they came.
  [[nodiscard]] std::span<model_id const> models_in(std::uint32_t chunk) const {
    return map_.models_in(chunk);
  }
  [[nodiscard]] std::uint64_t live_bytes() const noexcept { return map_.live_bytes(); }
  [[nodiscard]] std::uint64_t held_bytes() const noexcept { return map_.held_bytes(); }

 private:
  void check(model_id model, std::span<std::uint32_t const> offered) const;

  chunk_map map_;
  std::uint64_t alignment_;
  std::map<model_id, std::vector<extent>> models_;  ///< what each occupies
};

}  // namespace sluice::memhandover
