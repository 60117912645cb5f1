#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sluice {

/// A number that whoever runs the tests may set: how often something is tried, or a seed. Throws std::runtime_error if what is set
/// is not one.
[[nodiscard]] inline std::uint64_t from_environment(char const* variable, std::uint64_t otherwise) {
  char const* const text = std::getenv(variable);
  if (text == nullptr) {
    return otherwise;
  }
  auto const all = std::string_view{text};
  std::uint64_t number = 0;
  auto const parsed = std::from_chars(all.begin(), all.end(), number);
  if (parsed.ec != std::errc{} || parsed.ptr != all.end() || number == 0) {
    throw std::runtime_error{std::string{variable} + " must be a positive number, not " + text};
  }
  return number;
}

/// So many times, or one in SLUICE_TEST_SHORTER of them, though not fewer than `least`: for builds in which each takes long.
[[nodiscard]] inline std::uint64_t repeated(std::uint64_t times, std::uint64_t least = 1) {
  return std::max(least, times / from_environment("SLUICE_TEST_SHORTER", 1));
}

}  // namespace sluice
