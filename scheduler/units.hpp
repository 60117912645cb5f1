/// Time as the scheduler counts it: seconds in double precision, on a clock that the caller reads.
///
/// `instant` takes a `std::chrono::steady_clock::time_point` without a cast, so a server passes
/// `steady_clock::now()` and a simulator passes `instant{seconds{12.5}}`. Nothing in this folder
/// reads a clock.
#pragma once

#include <chrono>
#include <limits>

namespace sluice::scheduler {

using seconds = std::chrono::duration<double>;
using instant = std::chrono::time_point<std::chrono::steady_clock, seconds>;

/// An idle timeout that never runs out, or a wait without an end.
inline constexpr seconds forever{std::numeric_limits<double>::infinity()};

}  // namespace sluice::scheduler
