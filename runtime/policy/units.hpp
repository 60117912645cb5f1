/// Amounts as people write them: `64MiB`, `200ms`, `99%`; from text and back.
///
/// An amount is a decimal number, at most one space, and a unit. Without a unit it is refused, so
/// that nobody has to guess. The patterns are the same rules as ECMAScript regular expressions, for
/// the JSON Schema.
///
///   parse_bytes("1.5GiB");       // 1610612736
///   parse_duration("150ms");     // 150'000us
///   parse_percentage("99.9%");   // 0.999
///
/// Every `parse_…` throws `invalid_argument` with a sentence that says what would be right.
/// Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice::policy {

/// Units B, KiB, MiB, GiB, TiB; rounded to whole bytes.
[[nodiscard]] std::uint64_t parse_bytes(std::string_view text);
/// Units us, ms, s, m, h; rounded to whole microseconds.
[[nodiscard]] std::chrono::microseconds parse_duration(std::string_view text);
/// A share: `99%` is 0.99. Not limited to 100 %.
[[nodiscard]] double parse_percentage(std::string_view text);

/// In the largest unit that needs no fraction, e.g. "64MiB", "90s"; reads back as the same amount.
[[nodiscard]] std::string write_bytes(std::uint64_t bytes);
[[nodiscard]] std::string write_duration(std::chrono::microseconds duration);
/// At most six decimals: "99.9%".
[[nodiscard]] std::string write_percentage(double share);

inline constexpr std::string_view bytes_pattern = R"([0-9]+(\.[0-9]+)? ?(B|KiB|MiB|GiB|TiB))";
inline constexpr std::string_view duration_pattern = R"([0-9]+(\.[0-9]+)? ?(us|ms|s|m|h))";
inline constexpr std::string_view percentage_pattern = R"([0-9]+(\.[0-9]+)? ?%)";

}  // namespace sluice::policy
