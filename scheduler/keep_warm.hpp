/// How long a model is worth keeping, where holding its memory and starting it cold both cost something.
///
/// A second of holding costs `per_held_s`, a cold start `per_load`, in the same unit (say seconds of training). In a gap A between
/// requests a timeout T costs per_held_s · E[min(A, T)] + per_load · P(A > T).
///
///   keep_warm_costs const costs{.per_held_s = 1.0, .per_load = 2.0};
///   auto const best = cheapest_timeout(gaps, costs);
///   best.idle_timeout;
///
/// After a gap that is not known to be over nothing is learned if gaps are exponential: then either forever or not at all is
/// best, and all timeouts cost the same where λ · per_load = per_held_s. Pure functions of any thread; they throw
/// `std::invalid_argument` for costs that are negative or no numbers.
///
/// Source of `competitive_timeout`: Karlin, Manasse, Rudolph and Sleator, Algorithmica 3 (1988), snoopy caching.
#pragma once

#include "scheduler/distribution.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

struct keep_warm_costs {
  double per_held_s = 0.0;
  double per_load = 0.0;
};

struct keep_warm_choice {
  seconds idle_timeout{0.0};
  double cost_per_gap = 0.0;
};

/// Of one gap, on average.
[[nodiscard]] double keep_warm_cost(distribution const& gaps, keep_warm_costs const& costs,
                                    seconds idle_timeout);

/// The timeout of least cost: 0, `forever`, or one between, found to a millionth of itself.
[[nodiscard]] keep_warm_choice cheapest_timeout(distribution const& gaps,
                                                keep_warm_costs const& costs);

/// Costs at most twice what who knows each gap beforehand pays, whatever the gaps; `forever` if holding costs nothing.
[[nodiscard]] seconds competitive_timeout(keep_warm_costs const& costs);

}  // namespace sluice::scheduler
