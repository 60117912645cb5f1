#include "scheduler/reserve.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace sluice::scheduler {

namespace {

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t chunk) noexcept {
  std::uint64_t const rest = bytes % chunk;
  if (rest == 0) {
    return bytes;
  }
  std::uint64_t const whole = bytes - rest;
  return whole > std::numeric_limits<std::uint64_t>::max() - chunk ? whole : whole + chunk;
}

}  // namespace

reserve::reserve(std::uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
  if (chunk_bytes == 0) {
    throw std::invalid_argument("the chunk size must be > 0 bytes");
  }
}

reserve::move reserve::update(input const& now) noexcept {
  std::uint64_t const low = rounded_up(now.size_bytes, chunk_bytes_);
  std::uint64_t const high = low > std::numeric_limits<std::uint64_t>::max() / 2 ? low : 2 * low;
  refilling_ = now.free_bytes < low || (refilling_ && now.free_bytes < high);
  move result{.keep_bytes = now.free_bytes, .refilling = refilling_};
  if (refilling_) {
    result.reclaim_bytes = rounded_up(high - now.free_bytes, chunk_bytes_);
    result.keep_bytes += result.reclaim_bytes;
  } else if (now.free_bytes > high) {
    result.release_bytes = (now.free_bytes - high) / chunk_bytes_ * chunk_bytes_;
    result.keep_bytes -= result.release_bytes;
  }
  return result;
}

std::uint64_t reserve_size(std::span<cold_model const> models, std::uint64_t most_bytes,
                           seconds horizon, double likely) noexcept {
  std::uint64_t largest = 0;
  double expected = 0.0;
  for (auto const& m : models) {
    double const starts = m.loads_per_s * horizon.count();
    if (starts >= likely) {
      largest = std::max(largest, m.bytes);
    }
    // A model is one set of weights, however often it starts.
    expected += std::min(1.0, starts) * static_cast<double>(m.bytes);
  }
  if (expected >= static_cast<double>(most_bytes)) {
    return most_bytes;
  }
  return std::min(most_bytes, std::max(largest, static_cast<std::uint64_t>(expected)));
}

}  // namespace sluice::scheduler
