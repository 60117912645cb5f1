#include "memhandover/client/detail/pause_lease.hpp"

#include <algorithm>
#include <limits>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::detail {
namespace {

/// On the clock of shared memory; not later than meant.
std::int64_t monotonic_of(std::chrono::steady_clock::time_point instant) {
  constexpr auto never = std::numeric_limits<std::int64_t>::max();
  if (instant == std::chrono::steady_clock::time_point::max()) {
    return never;
  }
  auto const now = monotonic_ns();
  std::chrono::nanoseconds const left = instant - std::chrono::steady_clock::now();
  return left.count() < never - now ? now + left.count() : never;
}

}  // namespace

pause_lease::claim pause_lease::add(std::chrono::steady_clock::time_point until) {
  auto const added = claims_.insert(monotonic_of(until));
  renew();
  return added;
}

void pause_lease::drop(claim which) {
  claims_.erase(which);
  renew();
}

void pause_lease::renew() {
  if (claims_.empty()) {
    word_.store(0, std::memory_order_release);
    return;
  }
  auto const until = std::min(*claims_.rbegin(), monotonic_ns() + length_.count());
  word_.store(static_cast<std::uint64_t>(std::max<std::int64_t>(until, 1)),
              std::memory_order_release);
}

}  // namespace sluice::memhandover::detail
