/// Byte counts as literals, and as text for people.
///
///   auto chunk = 64_MiB;   // std::uint64_t
///   format_bytes(chunk);   // "64 MiB"
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

inline namespace literals {
constexpr std::uint64_t operator""_KiB(unsigned long long n) {
  return n << 10U;
}
constexpr std::uint64_t operator""_MiB(unsigned long long n) {
  return n << 20U;
}
constexpr std::uint64_t operator""_GiB(unsigned long long n) {
  return n << 30U;
}
}  // namespace literals

/// `n` in the largest binary unit that keeps it at or above one, with at most one decimal: "1.5
/// GiB".
[[nodiscard]] std::string format_bytes(std::uint64_t n);

}  // namespace sluice
