#include "memhandover/allocation/range_allocator.hpp"

#include <algorithm>

namespace sluice::memhandover {
namespace {

/// Of ranges, as start and size, the one that `offset` lies in.
std::optional<std::pair<std::size_t, std::size_t>> one_with(
    std::map<std::size_t, std::size_t> const& ranges, std::size_t offset) {
  auto const after = ranges.upper_bound(offset);
  if (after == ranges.begin()) {
    return std::nullopt;
  }
  auto const range = *std::prev(after);
  return offset < range.first + range.second ? std::optional{range} : std::nullopt;
}

}  // namespace

range_allocator::range_allocator(range_allocator const& other)
    : alignment_(other.alignment_),
      capacity_(other.capacity_),
      used_(other.used_),
      live_(other.live_),
      free_(other.free_),
      by_size_(other.by_size_) {
  while (spare_.size() < live_.size()) {
    spare_.push_back(make_nodes().sized);
  }
}

std::optional<std::size_t> range_allocator::allocate(std::size_t bytes) {
  auto const size = rounded(bytes);
  auto const fit = by_size_.lower_bound({size, 0});
  if (fit == by_size_.end()) {
    return std::nullopt;
  }
  auto const [available, offset] = *fit;
  // All that may throw comes first.
  if (spare_.size() == spare_.capacity()) {
    spare_.reserve(2 * spare_.size() + 1);
  }
  bool const leaves_rest = available > size;
  auto rest = leaves_rest ? make_nodes() : nodes{};
  auto taken = remove_free(free_.find(offset));
  if (leaves_rest) {
    add_free(std::move(rest), offset + size, available - size);
  }
  taken.at.mapped() = size;
  live_.insert(std::move(taken.at));
  spare_.push_back(std::move(taken.sized));
  used_ += size;
  return offset;
}

std::size_t range_allocator::free(std::size_t offset) noexcept {
  auto const found = live_.find(offset);
  if (found == live_.end()) {
    return 0;
  }
  auto const size = found->second;
  nodes freed{live_.extract(found), std::move(spare_.back())};
  spare_.pop_back();
  used_ -= size;
  auto start = offset;
  auto total = size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    total += next->second;
    auto const merged = next++;
    static_cast<void>(remove_free(merged));
  }
  if (next != free_.begin()) {
    auto const previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      total += previous->second;
      static_cast<void>(remove_free(previous));
    }
  }
  add_free(std::move(freed), start, total);
  return size;
}

std::optional<std::pair<std::size_t, std::size_t>> range_allocator::containing(
    std::size_t offset) const {
  return one_with(live_, offset);
}

std::optional<std::pair<std::size_t, std::size_t>> range_allocator::free_around(
    std::size_t offset) const {
  return one_with(free_, offset);
}

std::size_t range_allocator::shortage(std::size_t bytes) const {
  auto const size = rounded(bytes);
  if (by_size_.lower_bound({size, 0}) != by_size_.end()) {
    return 0;
  }
  return size - free_at_end();
}

void range_allocator::grow(std::size_t bytes) {
  if (bytes == 0) {
    return;
  }
  auto const tail = free_at_end();
  add_free(tail > 0 ? remove_free(std::prev(free_.end())) : make_nodes(), capacity_ - tail,
           tail + bytes);
  capacity_ += bytes;
}

std::size_t range_allocator::free_at_end() const {
  if (free_.empty()) {
    return 0;
  }
  auto const last = *free_.rbegin();
  return last.first + last.second == capacity_ ? last.second : 0;
}

void range_allocator::shrink(std::size_t bytes) noexcept {
  auto const taken = std::min(bytes, free_at_end());
  if (taken == 0) {
    return;
  }
  auto const last = std::prev(free_.end());
  auto const [offset, size] = *last;
  auto end = remove_free(last);
  if (size > taken) {
    add_free(std::move(end), offset, size - taken);
  }
  capacity_ -= taken;
}

range_allocator::nodes range_allocator::make_nodes() {
  by_offset at{{0, 0}};
  by_extent sized{{0, 0}};
  return {at.extract(at.begin()), sized.extract(sized.begin())};
}

void range_allocator::add_free(nodes with, std::size_t offset, std::size_t bytes) noexcept {
  with.at.key() = offset;
  with.at.mapped() = bytes;
  free_.insert(std::move(with.at));
  with.sized.value() = {bytes, offset};
  by_size_.insert(std::move(with.sized));
}

range_allocator::nodes range_allocator::remove_free(by_offset::iterator range) noexcept {
  auto sized = by_size_.extract({range->second, range->first});
  return {free_.extract(range), std::move(sized)};
}

}  // namespace sluice::memhandover
