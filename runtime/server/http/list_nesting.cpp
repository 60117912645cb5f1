#include "runtime/server/http/list_nesting.hpp"

#include <fmt/format.h>

#include <utility>

namespace sluice::server {

void list_nesting::fail(std::string message) {
  if (problem_.empty()) problem_ = std::move(message);
}

void list_nesting::open() {
  if (depth_ > 0) {
    if (leaf_depth_ == depth_) fail("mixes numbers and lists at one level");
    ++levels_[depth_ - 1].count;
  }
  ++depth_;
  if (depth_ > levels_.size()) levels_.emplace_back();
  levels_[depth_ - 1].count = 0;
}

void list_nesting::close() {
  level& current = levels_[depth_ - 1];
  if (!current.closed_one) {
    current.extent = current.count;
    current.closed_one = true;
  } else if (current.extent != current.count) {
    fail(fmt::format("is ragged: at nesting level {} one list has {} elements and another {}",
                     depth_, current.extent, current.count));
  }
  --depth_;
}

void list_nesting::add(std::size_t scalars) {
  if (scalars == 0) return;
  if (leaf_depth_ == 0 && levels_.size() == depth_) leaf_depth_ = depth_;
  if (leaf_depth_ != depth_) fail("mixes numbers and lists at one level");
  levels_[depth_ - 1].count += scalars;
  size_ += scalars;
}

std::vector<std::size_t> list_nesting::extents() const {
  std::vector<std::size_t> result;
  result.reserve(levels_.size());
  for (auto const& each : levels_) result.push_back(each.extent);
  return result;
}

}  // namespace sluice::server
