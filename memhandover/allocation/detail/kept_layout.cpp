#include "memhandover/allocation/detail/kept_layout.hpp"

#include <algorithm>
#include <cstring>

namespace sluice::memhandover::detail {
namespace {

constexpr std::uint32_t format = 1;

class byte_writer {
 public:
  template <typename Value>
  void put(Value value) {
    auto const* const from = reinterpret_cast<std::byte const*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
  }
  void put(std::string const& text) {
    put(static_cast<std::uint32_t>(text.size()));
    auto const* const from = reinterpret_cast<std::byte const*>(text.data());
    bytes_.insert(bytes_.end(), from, from + text.size());
  }
  [[nodiscard]] std::vector<std::byte> bytes() && { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads zeros behind the end, and remembers that.
class byte_reader {
 public:
  explicit byte_reader(std::span<std::byte const> bytes) : left_(bytes) {}

  template <typename Value>
  [[nodiscard]] Value get() {
    Value value{};
    if (auto const from = take(sizeof value); !from.empty()) {
      std::memcpy(&value, from.data(), sizeof value);
    }
    return value;
  }
  [[nodiscard]] std::string text() {
    auto const from = take(get<std::uint32_t>());
    return {reinterpret_cast<char const*>(from.data()), from.size()};
  }
  /// How many of `each` bytes follow, which the rest must have room for.
  [[nodiscard]] std::size_t count(std::size_t each) {
    auto const said = get<std::uint32_t>();
    bad_ = bad_ || said > left_.size() / each;
    return bad_ ? 0 : said;
  }
  [[nodiscard]] bool is_good() const noexcept { return !bad_; }
  [[nodiscard]] bool is_at_end() const noexcept { return left_.empty(); }

 private:
  std::span<std::byte const> take(std::size_t bytes) {
    bad_ = bad_ || bytes > left_.size();
    if (bad_) {
      return {};
    }
    auto const taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }

  std::span<std::byte const> left_;
  bool bad_ = false;
};

/// Whether ascending extents have no byte in common.
bool are_disjoint(std::vector<extent> const& sorted) {
  return std::adjacent_find(sorted.begin(), sorted.end(), [](extent const& a, extent const& b) {
           return a.end > b.begin;
         }) == sorted.end();
}

}  // namespace

std::vector<std::byte> pack(kept_layout const& layout) {
  byte_writer out;
  out.put(format);
  out.put(layout.tag);
  out.put(static_cast<std::uint32_t>(layout.stitched.size()));
  for (auto const& range : layout.stitched) {
    out.put(static_cast<std::uint32_t>(range.size()));
    for (auto const chunk : range) {
      out.put(chunk);
    }
  }
  out.put(static_cast<std::uint32_t>(layout.tensors.size()));
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    out.put(layout.sizes[i]);
    out.put(layout.tensors[i].range);
    out.put(layout.tensors[i].offset);
  }
  return std::move(out).bytes();
}

std::optional<kept_layout> unpack(std::span<std::byte const> bytes) {
  byte_reader in{bytes};
  if (in.get<std::uint32_t>() != format) {
    return std::nullopt;
  }
  kept_layout layout;
  layout.tag = in.text();
  layout.stitched.resize(in.count(sizeof(std::uint32_t)));
  for (auto& range : layout.stitched) {
    range.resize(in.count(sizeof(std::uint32_t)));
    for (auto& chunk : range) {
      chunk = in.get<std::uint32_t>();
    }
  }
  auto const tensors = in.count(2 * sizeof(std::uint64_t) + sizeof(std::uint32_t));
  for (std::size_t i = 0; i < tensors; ++i) {
    layout.sizes.push_back(in.get<std::uint64_t>());
    tensor_spot spot;
    spot.range = in.get<std::uint32_t>();
    spot.offset = in.get<std::uint64_t>();
    layout.tensors.push_back(spot);
  }
  if (!in.is_good() || !in.is_at_end()) {
    return std::nullopt;
  }
  return layout;
}

std::optional<std::vector<extent>> extents_of(kept_layout const& layout,
                                              std::span<std::uint32_t const> chunks,
                                              std::uint64_t chunk_bytes, std::uint64_t alignment) {
  std::vector<extent> found;
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    auto const& spot = layout.tensors[i];
    auto const bytes = rounded_to(alignment, layout.sizes[i]);
    bool const whole = spot.range == tensor_spot::whole_view;
    if (bytes < layout.sizes[i] || spot.offset % alignment != 0 ||
        (!whole && spot.range >= layout.stitched.size())) {
      return std::nullopt;
    }
    auto const range =
        whole ? std::span<std::uint32_t const>{} : std::span{layout.stitched[spot.range]};
    auto const room = whole ? (chunks.empty() ? 0 : (chunks.back() + 1ULL) * chunk_bytes)
                            : range.size() * chunk_bytes;
    if (spot.offset > room || bytes > room - spot.offset) {
      return std::nullopt;
    }
    // Chunk by chunk, since those of a range lie anywhere in the whole view.
    for (auto at = spot.offset; at < spot.offset + bytes;) {
      auto const number = at / chunk_bytes;
      auto const end = std::min((number + 1) * chunk_bytes, spot.offset + bytes);
      auto const chunk = whole ? static_cast<std::uint32_t>(number) : range[number];
      if (!std::binary_search(chunks.begin(), chunks.end(), chunk)) {
        return std::nullopt;
      }
      auto const begin = chunk * chunk_bytes + at % chunk_bytes;
      found.push_back({begin, begin + (end - at)});
      at = end;
    }
  }
  std::sort(found.begin(), found.end(),
            [](extent const& a, extent const& b) { return a.begin < b.begin; });
  return are_disjoint(found) ? std::optional{std::move(found)} : std::nullopt;
}

}  // namespace sluice::memhandover::detail
