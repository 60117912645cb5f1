/// How much work training may have on the device in advance, so that the tightest promise feels
/// little of it.
///
/// A request that finds the device in training's hands waits for what training has put on it: once,
/// by at most the bound B beyond the executing unit. Let a model promise that a share p of its
/// requests is answered within a latency, and need s for one. The tail of waits is C e^{−θt}, C ≤ 1
/// (docs/scheduler.md). Where the promise is just kept C e^{−θ(latency − s)} = 1 − p, so that θ is
/// at most ln(1/(1 − p)) / (latency − s), and B more of waiting makes misses more by the factor
/// e^{θB}. The bound is what keeps that below e^{0.05}: of a hundred requests not one is late, but
/// 1.05.
///
///   B = 0.05 · (latency − s) / ln(1/(1 − p))
///
/// The least of all models' counts, within limits: below 30 µs the launching thread cannot hide its
/// own hiccups from the device, above 1 ms a longer queue saves training hardly anything.
///
///   std::vector<run_ahead_promise> const promises{
///       {.share = 0.99, .latency = 20ms, .service = 2ms}};
///   run_ahead_bound(promises);   // 195 µs
///
/// Pure.
#pragma once

#include <span>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

inline constexpr seconds least_run_ahead{30e-6};
inline constexpr seconds most_run_ahead{1e-3};

/// What one model promises, and how long it takes.
struct run_ahead_promise {
  double share = 0.99;  ///< of requests to be answered within `latency`, in the long run; in (0, 1]
  seconds latency{0.0};
  seconds service{0.0};  ///< mean of one request on the warm model
};

/// `most_run_ahead` without any promise.
[[nodiscard]] seconds run_ahead_bound(std::span<run_ahead_promise const> promises) noexcept;

}  // namespace sluice::scheduler
