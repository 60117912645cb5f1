#include "memhandover/allocation/detail/placement_draft.hpp"

#include <algorithm>

namespace sluice::memhandover::detail {

placement_draft::~placement_draft() {
  for (auto const& each : occupied_) {
    map_.vacate(each, model_);
  }
}

void placement_draft::occupy(extent where) {
  for_each_chunk(where, map_.chunk_bytes(), [&](std::uint32_t chunk, extent) {
    append_once(decision_.touched, chunk);
    if (!map_.is_held(chunk)) {
      decision_.taken.push_back(chunk);
    }
  });
  occupied_.push_back(where);
  map_.occupy(where, model_, lasts_);
}

void placement_draft::stitch(wanted_tensor const& tensor, std::vector<extent> const& parts) {
  std::vector<std::uint32_t> chunks;
  for (auto const& part : parts) {
    for_each_chunk(part, map_.chunk_bytes(),
                   [&](std::uint32_t chunk, extent) { chunks.push_back(chunk); });
    occupy(part);
  }
  decision_.tensors[tensor.number] = {static_cast<std::uint32_t>(decision_.stitched.size()),
                                      parts.front().begin % map_.chunk_bytes()};
  decision_.stitched.push_back(std::move(chunks));
}

std::pair<load_decision, std::vector<extent>> placement_draft::keep() {
  make_set(decision_.taken);
  make_set(decision_.touched);
  return {std::move(decision_), std::exchange(occupied_, {})};
}

}  // namespace sluice::memhandover::detail
