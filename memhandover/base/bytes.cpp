#include "memhandover/base/bytes.hpp"

#include <array>
#include <cstdio>

namespace sluice {

std::string format_bytes(std::uint64_t n) {
  constexpr std::array<char const*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(n);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < units.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  bool const whole = value == static_cast<double>(static_cast<std::uint64_t>(value));
  std::snprintf(text.data(), text.size(), whole ? "%.0f %s" : "%.1f %s", value, units.at(unit));
  return text.data();
}

}  // namespace sluice
