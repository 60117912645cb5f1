/// How long is waited awake, and how long asleep.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

#include "runtime/gate/gate.hpp"

namespace sluice::gate {

/// Waking a thread costs as much as ten launches, so short waits are waited out awake.
inline constexpr std::chrono::microseconds spun_at_most{50};
/// Without a bound calls are left for so long after one that others had to agree to: until the next one
/// usually, since whoever works with others has one in every layer.
inline constexpr std::chrono::milliseconds left_behind_others{20};
/// Longer ones asleep; a lost wake-up would cost no more than this.
inline constexpr std::chrono::milliseconds nap_at_most{20};

/// Spins until `done`, for a while.
template <typename Done>
bool spin_until(Done done) {
  std::int64_t const end = monotonic_ns() + std::chrono::nanoseconds{spun_at_most}.count();
  while (!done()) {
    if (monotonic_ns() >= end) {
      return false;
    }
    ::sched_yield();
  }
  return true;
}

}  // namespace sluice::gate
