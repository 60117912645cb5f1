#include "scheduler/run_ahead.hpp"

#include <algorithm>
#include <cmath>

namespace sluice::scheduler {
namespace {

/// So much more, of themselves, may misses become.
constexpr double more_misses = 0.05;

}  // namespace

seconds run_ahead_bound(std::span<run_ahead_promise const> promises) noexcept {
  auto bound = most_run_ahead;
  for (auto const& each : promises) {
    auto const slack = std::max(seconds{0.0}, each.latency - each.service);
    // A promise without exception has no miss to spare; infinity leaves nothing of the slack.
    auto const exponents = -std::log1p(-std::clamp(each.share, 0.0, 1.0));
    bound = std::min(bound, exponents > 0.0 ? more_misses / exponents * slack : most_run_ahead);
  }
  return std::max(bound, least_run_ahead);
}

}  // namespace sluice::scheduler
