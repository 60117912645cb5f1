#include "runtime/server/http/nested_list.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

namespace sluice::server {

void nested_list::fail(std::string message) {
  if (problem_.empty()) problem_ = std::move(message);
}

void nested_list::open() {
  if (depth_ > 0) {
    if (leaf_depth_ == depth_) fail("mixes numbers and lists at one level");
    ++levels_[depth_ - 1].count;
  }
  ++depth_;
  if (depth_ > levels_.size()) levels_.emplace_back();
  levels_[depth_ - 1].count = 0;
}

void nested_list::close() {
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

void nested_list::add(kind_t kind, std::uint64_t bits) {
  if (leaf_depth_ == 0 && levels_.size() == depth_) leaf_depth_ = depth_;
  if (leaf_depth_ != depth_) fail("mixes numbers and lists at one level");
  ++levels_[depth_ - 1].count;
  if (!problem_.empty()) return;
  kinds_.push_back(kind);
  bits_.push_back(bits);
}

void nested_list::add_string(std::string_view text) {
  add(kind_t::string, strings_.size());
  if (!problem_.empty()) return;
  auto const length = static_cast<std::uint32_t>(text.size());
  for (unsigned shift = 0; shift < 32; shift += 8) {
    strings_.push_back(static_cast<char>((length >> shift) & 0xFFU));
  }
  strings_.append(text);
}

std::string_view nested_list::string(std::size_t i) const {
  std::size_t const at = bits_[i];
  std::uint32_t length = 0;
  for (unsigned k = 0; k < 4; ++k) {
    length |= static_cast<std::uint32_t>(static_cast<unsigned char>(strings_[at + k])) << (8 * k);
  }
  return std::string_view{strings_}.substr(at + 4, length);
}

std::string nested_list::text(std::size_t i) const {
  switch (kinds_[i]) {
    case kind_t::null:
      return "null";
    case kind_t::boolean:
      return bits_[i] != 0 ? "true" : "false";
    case kind_t::negative:
      return std::to_string(static_cast<std::int64_t>(bits_[i]));
    case kind_t::natural:
      return std::to_string(bits_[i]);
    case kind_t::real:
      return fmt::format("{:#}", real(i));
    case kind_t::string:
      break;
  }
  constexpr std::size_t shown = 40;
  auto const whole = string(i);
  if (whole.size() <= shown) return nlohmann::json(whole).dump();
  return fmt::format("a string of {} bytes", whole.size());
}

std::vector<std::size_t> nested_list::extents() const {
  std::vector<std::size_t> result;
  result.reserve(levels_.size());
  for (auto const& each : levels_) result.push_back(each.extent);
  return result;
}

}  // namespace sluice::server
