#include "memhandover/allocation/chunk_map.hpp"

#include <algorithm>

namespace sluice::memhandover {

void make_set(std::vector<std::uint32_t>& chunks) {
  auto const unordered = [](std::uint32_t a, std::uint32_t b) { return a >= b; };
  if (std::adjacent_find(chunks.begin(), chunks.end(), unordered) != chunks.end()) {
    std::sort(chunks.begin(), chunks.end());
    chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  }
}

void chunk_map::occupy(extent where, model_id whose, residence lasts) {
  for_each_chunk(where, chunk_bytes_,
                 [&](std::uint32_t number, extent part) { occupy_in(number, part, whose, lasts); });
}

void chunk_map::vacate(extent where, model_id whose) {
  for_each_chunk(where, chunk_bytes_,
                 [&](std::uint32_t number, extent part) { vacate_in(number, part, whose); });
}

bool chunk_map::is_free(extent where) const {
  bool free = true;
  for_each_chunk(where, chunk_bytes_, [&](std::uint32_t number, extent part) {
    if (!is_held(number)) {
      return;
    }
    auto const next = holes_.upper_bound(part.begin);
    free = free && next != holes_.begin() && std::prev(next)->second >= part.end;
  });
  return free;
}

void chunk_map::occupy_in(std::uint32_t number, extent where, model_id whose, residence lasts) {
  auto& in = chunks_[number];
  extent around{number * chunk_bytes_, (number + 1ULL) * chunk_bytes_};
  if (in.live == 0) {
    in.lasts = lasts;
    ++held_;
  } else {
    auto const hole = std::prev(holes_.upper_bound(where.begin));
    around = {hole->first, hole->second};
    remove_hole(hole);
  }
  if (around.begin < where.begin) {
    add_hole({around.begin, where.begin});
  }
  if (where.end < around.end) {
    add_hole({where.end, around.end});
  }
  if (std::find(in.models.begin(), in.models.end(), whose) == in.models.end()) {
    in.models.push_back(whose);
  }
  in.live += where.size();
  live_ += where.size();
}

void chunk_map::vacate_in(std::uint32_t number, extent where, model_id whose) {
  auto& in = chunks_[number];
  extent const whole{number * chunk_bytes_, (number + 1ULL) * chunk_bytes_};
  in.live -= where.size();
  live_ -= where.size();
  auto const next = holes_.lower_bound(where.begin);
  if (next != holes_.begin() && where.begin > whole.begin) {
    if (auto const previous = std::prev(next); previous->second == where.begin) {
      where.begin = previous->first;
      remove_hole(previous);
    }
  }
  if (next != holes_.end() && where.end < whole.end && next->first == where.end) {
    where.end = next->second;
    remove_hole(next);
  }
  if (in.live == 0) {
    in.models.clear();
    --held_;
    return;
  }
  add_hole(where);
  in.models.erase(std::remove(in.models.begin(), in.models.end(), whose), in.models.end());
}

void chunk_map::add_hole(extent where) {
  holes_.emplace(where.begin, where.end);
  by_size_.emplace(where.size(), where.begin);
}

void chunk_map::remove_hole(std::map<std::uint64_t, std::uint64_t>::iterator hole) {
  by_size_.erase({hole->second - hole->first, hole->first});
  holes_.erase(hole);
}

bool chunk_map::may_be_shared(std::uint64_t address, residence lasts) const {
  auto const& in = chunks_[address / chunk_bytes_];
  return in.lasts == lasts && chunk_bytes_ - in.live >= chunk_bytes_ / sharing_divisor;
}

std::optional<extent> chunk_map::smallest_hole(std::uint64_t bytes, residence lasts) const {
  for (auto each = by_size_.lower_bound({bytes, 0}); each != by_size_.end(); ++each) {
    if (may_be_shared(each->second, lasts)) {
      return extent{each->second, each->second + each->first};
    }
  }
  return std::nullopt;
}

std::optional<extent> chunk_map::largest_hole(residence lasts) const {
  auto const found = std::find_if(by_size_.rbegin(), by_size_.rend(), [&](auto const& hole) {
    return may_be_shared(hole.second, lasts);
  });
  if (found != by_size_.rend()) {
    return extent{found->second, found->second + found->first};
  }
  return std::nullopt;
}

}  // namespace sluice::memhandover
