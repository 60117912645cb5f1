#include "memhandover/allocation/detail/stitched_ranges.hpp"

#include <algorithm>

namespace sluice::memhandover::detail {

stitched_ranges::range stitched_ranges::get(std::vector<std::uint32_t> const& chunks) {
  {
    std::lock_guard const lock{mutex_};
    auto const found = std::find_if(kept_.begin(), kept_.end(),
                                    [&](range const& each) { return each.chunks == chunks; });
    if (found != kept_.end()) {
      auto taken = std::move(*found);
      kept_.erase(found);
      kept_chunks_ -= taken.chunks.size();
      taken.was_kept = true;
      return taken;
    }
  }
  range made{chunks, nullptr, false};
  made.data = pool_.stitch(chunks);
  return made;
}

void stitched_ranges::keep(range unused) noexcept {
  try {
    std::lock_guard const lock{mutex_};
    auto const& kept = kept_.emplace_back(std::move(unused));
    kept_chunks_ += kept.chunks.size();
  } catch (std::bad_alloc const&) {
    pool_.unstitch(unused.data, static_cast<std::uint32_t>(unused.chunks.size()));
  }
}

bool stitched_ranges::keeps(std::vector<std::uint32_t> const& chunks) const {
  std::lock_guard const lock{mutex_};
  return std::any_of(kept_.begin(), kept_.end(),
                     [&](range const& each) { return each.chunks == chunks; });
}

void stitched_ranges::trim(std::uint32_t most_chunks) noexcept {
  std::list<range> surplus;
  {
    std::lock_guard const lock{mutex_};
    while (kept_chunks_ > most_chunks) {
      kept_chunks_ -= kept_.front().chunks.size();
      surplus.splice(surplus.end(), kept_, kept_.begin());
    }
  }
  for (auto const& each : surplus) {
    pool_.unstitch(each.data, static_cast<std::uint32_t>(each.chunks.size()));
  }
}

}  // namespace sluice::memhandover::detail
