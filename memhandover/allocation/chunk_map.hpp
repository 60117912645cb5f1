/// Which bytes of a pool's chunks are live, and whose: the state behind tensor_placement.
///
/// Addresses are offsets in the whole view, where chunk i lies at i × chunk_bytes. A chunk is *held*
/// while at least one byte of it is live. A *hole* is a free extent of a held chunk; it ends at the
/// chunk's border even if its neighbour begins with one.
///
/// It only counts; there is no memory behind it. Thread-safety: none.
#pragma once

#include <boost/container/small_vector.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace sluice::memhandover {

using model_id = std::uint64_t;

/// How long what is placed is expected to stay. What stays shares no chunk with what comes and goes,
/// as long as there is another.
enum class residence : std::uint8_t { passing, lasting };

/// Bytes [begin, end) of the whole view.
struct extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
  [[nodiscard]] bool operator==(extent const&) const = default;
};

class chunk_map {
 public:
  chunk_map(std::uint64_t chunk_bytes, std::uint32_t chunk_count)
      : chunk_bytes_(chunk_bytes), chunks_(chunk_count) {}

  /// Makes free bytes live; chunks that were not held are held from now on.
  void occupy(extent where, model_id whose, residence lasts);
  /// Makes bytes free again that `occupy` made live for `whose`. All that `whose` has goes before
  /// its tenancy is asked for again.
  void vacate(extent where, model_id whose);

  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
  [[nodiscard]] std::uint32_t chunk_count() const noexcept {
    return static_cast<std::uint32_t>(chunks_.size());
  }
  /// Whether no byte of it is live.
  [[nodiscard]] bool is_free(extent where) const;
  [[nodiscard]] bool is_held(std::uint32_t chunk) const { return chunks_[chunk].live > 0; }
  [[nodiscard]] std::span<model_id const> models_in(std::uint32_t chunk) const {
    return chunks_[chunk].models;
  }
  [[nodiscard]] std::uint64_t live_bytes() const noexcept { return live_; }
  [[nodiscard]] std::uint64_t held_bytes() const noexcept { return held_ * chunk_bytes_; }
  [[nodiscard]] std::uint64_t hole_bytes() const noexcept { return held_bytes() - live_; }

  /// Holes in chunks of that kind which are free for 1/`sharing_divisor` or more. What a fuller
  /// chunk has left is not worth that a second model keeps it from becoming empty.
  [[nodiscard]] std::optional<extent> smallest_hole(std::uint64_t bytes, residence lasts) const;
  [[nodiscard]] std::optional<extent> largest_hole(residence lasts) const;
  static constexpr std::uint64_t sharing_divisor = 16;

  /// All holes by address: begin → end.
  [[nodiscard]] std::map<std::uint64_t, std::uint64_t> const& holes() const noexcept {
    return holes_;
  }

 private:
  struct chunk_use {
    std::uint64_t live = 0;
    residence lasts = residence::passing;  ///< of the model that it was taken for
    boost::container::small_vector<model_id, 1> models;
  };

  void occupy_in(std::uint32_t number, extent where, model_id whose, residence lasts);
  void vacate_in(std::uint32_t number, extent where, model_id whose);
  void add_hole(extent where);
  void remove_hole(std::map<std::uint64_t, std::uint64_t>::iterator hole);
  [[nodiscard]] bool may_be_shared(std::uint64_t address, residence lasts) const;

  std::uint64_t chunk_bytes_;
  std::vector<chunk_use> chunks_;
  std::map<std::uint64_t, std::uint64_t> holes_;               ///< begin → end
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  ///< (size, begin) of the same
  std::uint64_t live_ = 0;
  std::uint64_t held_ = 0;  ///< chunks
};

/// Calls `each(chunk, part)` for the part of `where` that lies in each chunk.
template <typename Each>
void for_each_chunk(extent where, std::uint64_t chunk_bytes, Each&& each) {
  auto number = static_cast<std::uint32_t>(where.begin / chunk_bytes);
  for (auto border = (number + 1ULL) * chunk_bytes; where.begin < where.end;
       ++number, border += chunk_bytes) {
    extent const part{where.begin, where.end < border ? where.end : border};
    each(number, part);
    where.begin = part.end;
  }
}

/// Appends a chunk that is not the last one already.
inline void append_once(std::vector<std::uint32_t>& chunks, std::uint32_t chunk) {
  if (chunks.empty() || chunks.back() != chunk) {
    chunks.push_back(chunk);
  }
}

/// Sorts and leaves each chunk once. What placing yields is nearly always a set already, and then this
/// is cheap: it lies on a request's path.
void make_set(std::vector<std::uint32_t>& chunks);

}  // namespace sluice::memhandover
