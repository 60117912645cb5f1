#include "memhandover/range_allocator.hpp"

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

std::optional<std::size_t> range_allocator::allocate(std::size_t bytes) {
  auto const size = rounded(bytes);
  auto const fit = by_size_.lower_bound({size, 0});
  if (fit == by_size_.end()) {
    return std::nullopt;
  }
  auto const [available, offset] = *fit;
  remove_free(free_.find(offset));
  if (available > size) {
    add_free(offset + size, available - size);
  }
  live_.emplace(offset, size);
  used_ += size;
  return offset;
}

std::size_t range_allocator::free(std::size_t offset) {
  auto const found = live_.find(offset);
  if (found == live_.end()) {
    return 0;
  }
  auto const size = found->second;
  live_.erase(found);
  used_ -= size;
  auto start = offset;
  auto total = size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    total += next->second;
    auto const merged = next++;
    remove_free(merged);
  }
  if (next != free_.begin()) {
    auto const previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      total += previous->second;
      remove_free(previous);
    }
  }
  add_free(start, total);
  return size;
}

std::size_t range_allocator::size_at(std::size_t offset) const {
  auto const found = live_.find(offset);
  return found == live_.end() ? 0 : found->second;
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
  auto const tail = free_at_end();
  if (tail > 0) {
    remove_free(std::prev(free_.end()));
  }
  add_free(capacity_ - tail, tail + bytes);
  capacity_ += bytes;
}

std::size_t range_allocator::free_at_end() const {
  if (free_.empty()) {
    return 0;
  }
  auto const last = *free_.rbegin();
  return last.first + last.second == capacity_ ? last.second : 0;
}

void range_allocator::shrink(std::size_t bytes) {
  auto const taken = std::min(bytes, free_at_end());
  if (taken == 0) {
    return;
  }
  auto const last = std::prev(free_.end());
  auto const [offset, size] = *last;
  remove_free(last);
  if (size > taken) {
    add_free(offset, size - taken);
  }
  capacity_ -= taken;
}

void range_allocator::add_free(std::size_t offset, std::size_t bytes) {
  if (bytes > 0) {
    free_.emplace(offset, bytes);
    by_size_.emplace(bytes, offset);
  }
}

void range_allocator::remove_free(std::map<std::size_t, std::size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace sluice::memhandover
