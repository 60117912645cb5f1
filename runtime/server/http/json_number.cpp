#include "runtime/server/http/json_number.hpp"

#include <charconv>
#include <cmath>
#include <system_error>

namespace sluice::server::decimal {
namespace {

/// Of a number that a type has no room for: whether it is too small, rather than too large.
bool is_tiny(std::string_view text) {
  std::int64_t place = 0;  // of its first digit but zeros, in powers of ten
  bool is_found = false;
  bool is_fraction = false;
  std::size_t i = 0;
  for (; i < text.size() && text[i] != 'e' && text[i] != 'E'; ++i) {
    if (text[i] == '.') is_fraction = true;
    if (!is_digit(text[i])) continue;
    if (!is_found) {
      is_found = text[i] != '0';
      if (is_fraction) --place;
    } else if (!is_fraction) {
      ++place;
    }
  }
  if (i == text.size()) return place < 0;
  bool const is_down = text[++i] == '-';
  std::int64_t power = 0;
  for (; i < text.size(); ++i) {
    // a text below 4 GiB has fewer digits than this
    if (is_digit(text[i]) && power < std::int64_t{1} << 40U) power = power * 10 + (text[i] - '0');
  }
  return place + (is_down ? -power : power) < 0;
}

template <typename Real>
std::optional<Real> rounded(std::string_view text) {
  Real value = 0;
  auto const status = std::from_chars(text.data(), text.data() + text.size(), value).ec;
  if (status == std::errc{} && std::isfinite(value)) return value;
  if (!is_tiny(text)) return std::nullopt;
  return text.starts_with('-') ? Real{-0.0} : Real{0};
}

}  // namespace

std::optional<float> rounded_float(std::string_view text) {
  return rounded<float>(text);
}
std::optional<double> rounded_double(std::string_view text) {
  return rounded<double>(text);
}

}  // namespace sluice::server::decimal
