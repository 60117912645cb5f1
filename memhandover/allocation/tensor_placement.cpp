#include "memhandover/allocation/tensor_placement.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "memhandover/allocation/detail/placement_draft.hpp"
#include "memhandover/allocation/detail/placement_ways.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {

tensor_placement::tensor_placement(std::uint64_t chunk_bytes, std::uint32_t chunk_count,
                                   std::uint64_t alignment)
    : map_(chunk_bytes, chunk_count), alignment_(alignment) {
  if (chunk_bytes == 0 || chunk_count == 0) {
    throw error{error_kind::invalid_argument, "tensors cannot be placed in a pool without chunks"};
  }
  if (!std::has_single_bit(alignment) || chunk_bytes % alignment != 0) {
    throw error{error_kind::invalid_argument,
                "tensors cannot be aligned to " + std::to_string(alignment) +
                    " bytes in chunks of " + format_bytes(chunk_bytes) +
                    "; it must be a power of two that divides them"};
  }
}

std::uint32_t tensor_placement::chunks_that_suffice(std::span<std::uint64_t const> sizes) const {
  std::uint64_t bytes = 0;
  for (auto const each : sizes) {
    bytes += rounded_to(alignment_, each);
  }
  return static_cast<std::uint32_t>((bytes + map_.chunk_bytes() - 1) / map_.chunk_bytes());
}

void tensor_placement::check(model_id model, std::span<std::uint32_t const> offered) const {
  if (models_.contains(model)) {
    throw error{error_kind::invalid_argument,
                "model " + std::to_string(model) + " has been placed already; unload it first"};
  }
  for (std::size_t i = 0; i < offered.size(); ++i) {
    bool const exists = offered[i] < map_.chunk_count();
    if (!exists || map_.is_held(offered[i]) || (i > 0 && offered[i] <= offered[i - 1])) {
      throw error{error_kind::invalid_argument,
                  "chunk " + std::to_string(offered[i]) + " is offered but " +
                      (!exists                    ? "does not exist"
                       : map_.is_held(offered[i]) ? "holds tensors"
                                                  : "is out of order")};
    }
  }
}

std::optional<load_decision> tensor_placement::load(model_id model,
                                                    std::span<std::uint64_t const> sizes,
                                                    std::span<std::uint32_t const> offered,
                                                    residence lasts, placing_way last) {
  check(model, offered);
  std::vector<detail::wanted_tensor> tensors;
  tensors.reserve(sizes.size());
  std::uint64_t bytes = 0;
  for (auto const each : sizes) {
    tensors.push_back({rounded_to(alignment_, each), static_cast<std::uint32_t>(tensors.size())});
    bytes += tensors.back().bytes;
  }
  if (bytes > map_.hole_bytes() + offered.size() * map_.chunk_bytes()) {
    return std::nullopt;
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](auto const& a, auto const& b) { return a.bytes > b.bytes; });
  for (auto const way : {placing_way::tidy, placing_way::dense, placing_way::tight}) {
    if (way > last) {
      break;
    }
    detail::placement_draft draft{map_, model, lasts, sizes.size()};
    bool const placed = way == placing_way::tight
                            ? detail::place_tightly(draft, tensors, offered)
                            : detail::place_tidily(draft, tensors, offered,
                                                   way == placing_way::tidy ? detail::gaps::left
                                                                            : detail::gaps::closed);
    if (placed) {
      auto [decision, occupied] = draft.keep();
      models_.emplace(model, std::move(occupied));
      decision.way = way;
      return std::move(decision);
    }
  }
  return std::nullopt;
}

bool tensor_placement::restore(model_id model, std::span<extent const> where, residence lasts) {
  check(model, {});
  auto const end = map_.chunk_count() * map_.chunk_bytes();
  if (!std::all_of(where.begin(), where.end(), [&](extent const& each) {
        return each.begin < each.end && each.end <= end && map_.is_free(each);
      })) {
    return false;
  }
  auto const& occupied =
      models_.emplace(model, std::vector<extent>{where.begin(), where.end()}).first->second;
  for (auto const& each : occupied) {
    map_.occupy(each, model, lasts);
  }
  return true;
}

unload_decision tensor_placement::unload(model_id model) {
  auto const found = models_.find(model);
  if (found == models_.end()) {
    throw error{error_kind::not_found, "model " + std::to_string(model) + " has not been placed"};
  }
  std::vector<std::uint32_t> touched;
  for (auto const& each : found->second) {
    map_.vacate(each, model);
    for_each_chunk(each, map_.chunk_bytes(),
                   [&](std::uint32_t chunk, extent) { append_once(touched, chunk); });
  }
  models_.erase(found);
  make_set(touched);
  unload_decision result;
  for (auto const chunk : touched) {
    (map_.is_held(chunk) ? result.kept : result.emptied).push_back(chunk);
  }
  return result;
}

}  // namespace sluice::memhandover
