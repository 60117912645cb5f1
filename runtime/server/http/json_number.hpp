/// Numbers as JSON writes them, read where they stand: eight digits at once, and rounded once.
///
///   json_number number;
///   if (auto const* const rest = scan_number(at, end, number)) {  // else there is none
///     float_of(number);    // nothing: beyond the type's range
///     number.is_integer;   // it has neither a fraction nor an exponent
///   }
///
/// What a few multiplications cannot round correctly std::from_chars does, with the same result.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

namespace sluice::server {

struct json_number {
  std::string_view text;
  std::uint64_t digits = 0;     ///< all of them as one integer, if that is exact
  std::ptrdiff_t exponent = 0;  ///< of ten, which they are multiplied by
  bool is_negative = false;
  bool is_integer = false;
  bool is_exact = false;
};

namespace decimal {

// Of ten. Not inside of functions, each call of which would have tables of its own.
inline constexpr std::array<std::uint64_t, 9> integer_powers{
    1, 10, 100, 1'000, 10'000, 100'000, 1'000'000, 10'000'000, 100'000'000};
inline constexpr std::array<double, 23> real_powers{1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                                    1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                                    1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

[[nodiscard]] inline bool is_digit(char c) noexcept {
  return static_cast<unsigned char>(c - '0') < 10;
}

/// How many of eight characters, in the order of memory, are digits before the first that is none.
[[nodiscard]] inline unsigned digits_in_front(std::uint64_t eight) noexcept {
  auto const values = eight ^ 0x3030303030303030U;  // a digit's is below 10
  auto const others =
      (((values & 0x7F7F7F7F7F7F7F7FU) + 0x7676767676767676U) | values) & 0x8080808080808080U;
  return others == 0 ? 8 : static_cast<unsigned>(std::countr_zero(others)) / 8;
}

/// The number that the first `count` of them are. Three multiplications: pairs, fours, eight.
[[nodiscard]] inline std::uint64_t value_of(std::uint64_t eight, unsigned count) noexcept {
  if (count == 0) return 0;
  auto values = (eight ^ 0x3030303030303030U) << (64 - 8 * count);  // zeros in front
  values = values * 10 + (values >> 8U);
  return (((values & 0x000000FF000000FFU) * 0x000F424000000064U) +
          (((values >> 16U) & 0x000000FF000000FFU) * 0x0000271000000001U)) >>
         32U;
}

/// Appends the digits at `at` to `number`, modulo 2^64; returns what is behind them.
[[nodiscard, gnu::always_inline]] inline char const* take_digits(char const* at, char const* end,
                                                                 std::uint64_t& number) noexcept {
  while (end - at >= 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, at, sizeof(eight));
    auto const count = digits_in_front(eight);
    number = number * integer_powers[count] + value_of(eight, count);
    at += count;
    if (count < 8) return at;
  }
  for (; at != end && is_digit(*at); ++at) {
    number = number * 10 + static_cast<std::uint64_t>(*at - '0');
  }
  return at;
}

/// `digits` times a power of ten, with two roundings at most; nothing where a table does not reach.
[[nodiscard]] inline std::optional<double> scaled(json_number const& number) noexcept {
  if (!number.is_exact || number.exponent < -22 || number.exponent > 22) return std::nullopt;
  auto const digits = static_cast<double>(number.digits);
  return number.exponent <= 0 ? digits / real_powers[static_cast<std::size_t>(-number.exponent)]
                              : digits * real_powers[static_cast<std::size_t>(number.exponent)];
}

[[nodiscard]] std::optional<float> rounded_float(std::string_view text);
[[nodiscard]] std::optional<double> rounded_double(std::string_view text);

}  // namespace decimal

/// What is behind the number that begins at `at`; null if none does.
[[nodiscard, gnu::always_inline]] inline char const* scan_number(char const* at, char const* end,
                                                                 json_number& number) noexcept {
  auto const* const begin = at;
  bool const is_negative = at != end && *at == '-';
  at += is_negative ? 1 : 0;
  auto const* const whole = at;
  std::uint64_t digits = 0;
  at = decimal::take_digits(at, end, digits);
  auto count = at - whole;
  if (count == 0 || (count > 1 && *whole == '0')) return nullptr;
  bool is_integer = true;
  std::ptrdiff_t exponent = 0;
  if (at != end && *at == '.') {
    auto const* const fraction = ++at;
    at = decimal::take_digits(at, end, digits);
    if (at == fraction) return nullptr;
    is_integer = false;
    count += at - fraction;
    exponent = fraction - at;
  }
  if (at != end && (*at == 'e' || *at == 'E')) {
    ++at;
    bool const is_down = at != end && *at == '-';
    if (is_down || (at != end && *at == '+')) ++at;
    if (at == end || !decimal::is_digit(*at)) return nullptr;
    std::ptrdiff_t power = 0;
    for (; at != end && decimal::is_digit(*at); ++at) {
      if (power < 10'000) power = power * 10 + (*at - '0');
    }
    is_integer = false;
    exponent += is_down ? -power : power;
  }
  number = {{begin, static_cast<std::size_t>(at - begin)},
            digits,
            exponent,
            is_negative,
            is_integer,
            count <= std::numeric_limits<std::uint64_t>::digits10};
  return at;
}

/// The nearest float, ties to even; 0 where it is smaller than any; nothing where it is larger.
[[nodiscard, gnu::always_inline]] inline std::optional<float> float_of(json_number const& number) {
  constexpr std::uint64_t below_float = (std::uint64_t{1} << 29U) - 1;  // bits that a float lacks
  constexpr std::uint64_t tie = std::uint64_t{1} << 28U;
  constexpr std::uint64_t doubt =
      4;  // in units of the last place, of which two roundings are half each
  if (auto const near = decimal::scaled(number)) {
    auto const lost = std::bit_cast<std::uint64_t>(*near) & below_float;
    bool const is_normal = *near > 2e-38 && *near < 3e38;
    if ((is_normal && lost - (tie - doubt) > 2 * doubt) || number.digits == 0) {
      // without a branch: which sign comes next nobody can guess
      auto const sign = static_cast<std::uint32_t>(number.is_negative) << 31U;
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(*near)) | sign);
    }
  }
  return decimal::rounded_float(number.text);
}

/// The same of doubles.
[[nodiscard, gnu::always_inline]] inline std::optional<double> double_of(
    json_number const& number) {
  // digits and power are both exact then, and the one operation rounds
  if (number.digits <= std::uint64_t{1} << 53U) {
    if (auto const exact = decimal::scaled(number)) {
      auto const sign = static_cast<std::uint64_t>(number.is_negative) << 63U;
      return std::bit_cast<double>(std::bit_cast<std::uint64_t>(*exact) | sign);
    }
  }
  return decimal::rounded_double(number.text);
}

}  // namespace sluice::server
