/// Which ranks have fallen silent, by what their counts are whenever this one looks.
///
/// A rank is silent whose count stays the same for as long as the patience, and in as many looks as that has
/// room for. Where this rank could not look, because the store or itself stood still, nobody's silence counts:
///
///   looks    │ 7 │ 7 │ 7 │ 7 │                  │ 7 │ 8 │      not silent, however long the gap
///
/// Pure: it is told the time. Thread-safety: none.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

namespace sluice::nccl_shim {

/// A number as text, or `has_left`.
using beat = std::array<char, 24>;

class silences {
 public:
  /// What a rank writes that is not to be missed.
  static constexpr char const* has_left = "left";
  /// So often is looked within the patience.
  static constexpr int looks = 10;

  silences(unsigned ranks, std::chrono::nanoseconds patience, std::int64_t now)
      : patience_{patience}, of_(ranks, rank{{}, now, 0}) {}

  /// The ranks that are silent. `now` is before the counts were read.
  [[nodiscard]] std::vector<unsigned> look(std::span<beat const> counts, std::int64_t now);

 private:
  struct rank {
    beat seen;
    std::int64_t since;  // that was seen first
    int looks;           // in which it has been the same since
  };
  std::chrono::nanoseconds patience_;
  std::vector<rank> of_;
};

}  // namespace sluice::nccl_shim
