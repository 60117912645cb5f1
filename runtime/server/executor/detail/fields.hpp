/// Fields one after the other in bytes, as two programs of one build write and read them. What is read is checked.
///
///   std::vector<std::byte> bytes;
///   put_number<std::int64_t>(bytes, 7);
///   put_text(bytes, "sum");
///   field_reader from{bytes};
///   auto const seven = from.number<std::int64_t>();
///   auto const sum = from.text();
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "memhandover/base/error.hpp"

namespace sluice::server::detail {

inline void put_raw(std::vector<std::byte>& into, void const* from, std::size_t bytes) {
  auto const* const first = static_cast<std::byte const*>(from);
  into.insert(into.end(), first, first + bytes);
}

template <typename Number>
void put_number(std::vector<std::byte>& into, Number value) {
  static_assert(std::is_trivially_copyable_v<Number>);
  put_raw(into, &value, sizeof value);
}

inline void put_text(std::vector<std::byte>& into, std::string_view text) {
  put_number(into, static_cast<std::uint32_t>(text.size()));
  put_raw(into, text.data(), text.size());
}

/// Throws `invalid_argument` where there is less than is asked for.
class field_reader {
 public:
  explicit field_reader(std::span<std::byte const> from) : left_(from) {}

  template <typename Number>
  [[nodiscard]] Number number() {
    static_assert(std::is_trivially_copyable_v<Number>);
    Number value{};
    auto const from = take(sizeof value);
    std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  [[nodiscard]] std::string text() {
    auto const from = take(number<std::uint32_t>());
    return {reinterpret_cast<char const*>(from.data()), from.size()};
  }
  /// How many follow, of which each takes at least so many bytes.
  [[nodiscard]] std::size_t count(std::size_t least) {
    auto const many = number<std::uint32_t>();
    if (many > left_.size() / least) {
      refuse();
    }
    return many;
  }
  [[nodiscard]] std::span<std::byte const> take(std::size_t bytes) {
    if (bytes > left_.size()) {
      refuse();
    }
    auto const taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }

 private:
  [[noreturn]] static void refuse() {
    throw error{error_kind::invalid_argument,
                "a message between a server and its executor has fewer fields than it takes"};
  }

  std::span<std::byte const> left_;
};

}  // namespace sluice::server::detail
