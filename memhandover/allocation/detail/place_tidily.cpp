#include <algorithm>

#include "memhandover/allocation/detail/chunk_runs.hpp"
#include "memhandover/allocation/detail/placement_ways.hpp"

namespace sluice::memhandover::detail {
namespace {

/// A run's end stays a hole as long as holes are below this share of what is held.
constexpr std::uint64_t hole_divisor = 128;

class tidy_way {
 public:
  tidy_way(placement_draft& draft, std::vector<wanted_tensor> tensors,
           std::span<std::uint32_t const> offered, gaps what)
      : draft_(draft),
        chunk_(draft.map().chunk_bytes()),
        rest_(std::move(tensors)),
        runs_(offered),
        leaves_none_(what == gaps::closed) {
    for (auto const& each : rest_) {
      left_ += each.bytes;
    }
  }

  [[nodiscard]] bool place() {
    while (!rest_.empty() && (leaves_none_ || left_ >= chunk_ || is_large(rest_.front()))) {
      if (!open_run()) {
        return false;
      }
      fill(open_);
      leave_whole_chunks();
    }
    return place_remainder();
  }

 private:
  [[nodiscard]] bool is_large(wanted_tensor const& tensor) const {
    return tensor.bytes >= chunk_ / 2;
  }
  [[nodiscard]] std::uint32_t chunks_for(std::uint64_t bytes) const {
    return static_cast<std::uint32_t>((bytes + chunk_ - 1) / chunk_);
  }

  [[nodiscard]] bool has_many_holes() const {
    auto const& map = draft_.map();
    return map.hole_bytes() > std::max(chunk_, map.held_bytes() / hole_divisor);
  }

  /// Chunks that the rest would get if they were neighbours: all that it fills, and one more where
  /// large tensors end in it.
  [[nodiscard]] std::uint32_t wanted() const {
    std::uint64_t large = 0;
    for (auto each = rest_.begin(); each != rest_.end() && is_large(*each); ++each) {
      large += each->bytes;
    }
    return std::max({1U, static_cast<std::uint32_t>(left_ / chunk_), chunks_for(large)});
  }

  /// Makes `open_` an extent that the next tensor fits, or places one that nothing fits.
  [[nodiscard]] bool open_run() {
    bool const has_gap = open_.size() > (leaves_none_ ? 0 : chunk_ / chunk_map::sharing_divisor);
    if (rest_.front().bytes > runs_.longest() * chunk_) {
      return stitch(rest_.begin(), has_gap ? open_ : extent{}, true);
    }
    auto const& map = draft_.map();
    if (has_gap &&
        (leaves_none_ || map.hole_bytes() > std::max(chunk_, map.held_bytes() / hole_divisor))) {
      // The smallest one touches the fewest chunks.
      return stitch(std::prev(rest_.end()), open_, false);
    }
    auto const run = runs_.take(wanted());
    open_ = {run.first * chunk_, (run.first + run.count) * chunk_};
    return run.count > 0;
  }

  /// Puts a tensor into `gap`, which ends a chunk, and runs elsewhere; `open_` is what the last one
  /// has left.
  [[nodiscard]] bool stitch(std::vector<wanted_tensor>::iterator tensor, extent gap,
                            bool from_shortest) {
    std::vector<extent> parts;
    if (gap.size() > 0) {
      parts.push_back(gap);
    }
    for (auto need = tensor->bytes - gap.size(); need > 0;) {
      auto const run = from_shortest ? runs_.take_from_shortest(chunks_for(need))
                                     : runs_.take(std::max(chunks_for(need), wanted()));
      if (run.count == 0) {
        return false;
      }
      auto const begin = run.first * chunk_;
      auto const end = begin + run.count * chunk_;
      auto const used = std::min(need, end - begin);
      parts.push_back({begin, begin + used});
      open_ = {begin + used, end};
      need -= used;
    }
    draft_.stitch(*tensor, parts);
    left_ -= tensor->bytes;
    rest_.erase(tensor);
    return true;
  }

  /// Puts into `space`, from its beginning on, what fits, the largest first.
  void fill(extent& space) {
    auto const begin = space.begin;
    std::erase_if(rest_, [&](wanted_tensor const& each) {
      if (each.bytes > space.size()) {
        return false;
      }
      draft_.put(each, space.begin);
      space.begin += each.bytes;
      left_ -= each.bytes;
      return true;
    });
    if (space.begin > begin) {
      draft_.occupy({begin, space.begin});
    }
  }

  /// Chunks of `open_` that nothing lies in can be had by others.
  void leave_whole_chunks() {
    auto const first = chunks_for(open_.begin);
    auto const end = static_cast<std::uint32_t>(open_.end / chunk_);
    if (first < end) {
      runs_.put_back({first, end - first});
      open_.end = first * chunk_;
    }
  }

  /// What is left is less than a chunk, and fits no gap of this load.
  [[nodiscard]] bool place_remainder() {
    while (!rest_.empty()) {
      auto hole = draft_.map().smallest_hole(left_, draft_.lasts());
      if (!hole && (left_ <= chunk_ / 2 || has_many_holes())) {
        hole = draft_.map().largest_hole(draft_.lasts());
      }
      if (hole && hole->size() >= rest_.back().bytes) {
        fill(*hole);
        continue;
      }
      auto const run = runs_.take_from_shortest(1);
      if (run.count == 0) {
        return false;
      }
      extent opened{run.first * chunk_, (run.first + 1ULL) * chunk_};
      fill(opened);
    }
    return true;
  }

  placement_draft& draft_;
  std::uint64_t chunk_;
  std::vector<wanted_tensor> rest_;  ///< from the largest on
  std::uint64_t left_ = 0;           ///< bytes of the same
  chunk_runs runs_;
  bool leaves_none_;
  extent open_{};  ///< what is free of the run that is being filled
};

}  // namespace

bool place_tidily(placement_draft& draft, std::vector<wanted_tensor> tensors,
                  std::span<std::uint32_t const> offered, gaps what) {
  return tidy_way{draft, std::move(tensors), offered, what}.place();
}

}  // namespace sluice::memhandover::detail
