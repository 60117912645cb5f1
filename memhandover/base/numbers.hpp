/// Numbers in texts that come from outside.
///
///   parse_number<int>("12");    // 12
///   parse_number<int>("12 s");  // nothing
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace sluice {

/// The number that all of `text` is, in decimal digits, with a minus sign where the type has one; nothing if it is something else, or
/// beyond the type.
template <typename Number>
[[nodiscard]] std::optional<Number> parse_number(std::string_view text) noexcept {
  Number value{};
  auto const [stop, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  return failed == std::errc{} && stop == text.data() + text.size() ? std::optional{value}
                                                                    : std::nullopt;
}

}  // namespace sluice
