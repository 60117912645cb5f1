/// The last values of one duration, and their quantiles.
///
///   latency_window warm;
///   warm.add(3ms);
///   warm.summary();   // {n, p50, p99}; n counts all that were ever added
///
/// Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice::server {

class latency_window {
 public:
  static constexpr std::size_t capacity = 4096;

  struct quantiles {
    std::uint64_t n = 0;
    std::chrono::nanoseconds p50{};
    std::chrono::nanoseconds p99{};
  };

  void add(std::chrono::nanoseconds value);
  /// Nearest-rank quantiles over the last `capacity` values; zero without any.
  [[nodiscard]] quantiles summary() const;

 private:
  std::vector<std::chrono::nanoseconds> values_;
  std::uint64_t added_ = 0;
};

}  // namespace sluice::server
