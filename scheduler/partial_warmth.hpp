/// P(response ≤ latency) of a model that is released after an idle time and comes back either warm, because a reserve has kept
/// its place, or by a load that requests sit through: the chain by which Sirius chooses its two parameters.
///
/// States are a number of requests and a phase, warm or cold. All times are exponential, the idle timeout too.
///
///   0 warm ──1/T──► 0 cold ──αλ──► 1 cold, else 1 warm
///   n ──λ──► n + 1    n cold ──1/L──► n warm ──μ──► n − 1 warm
///
/// The matrix R of its matrix-geometric solution is triangular, so that all is in closed form: R = (ρ 0; ρ r) with ρ = λ/μ and
/// r = λL/(1 + λL). A response is a sum of at most three exponentials.
///
///   partial_warmth chain{.arrivals_per_s = 1.75, .service = 7.3ms, .load = 14.3ms,
///                        .idle_timeout = 5s, .cold_share = 0.906};
///   solve(chain, 29.2ms).share_within;                    // 0.959
///
/// Pure function of any thread; throws `std::invalid_argument` for what is negative or no number.
///
/// Sources: Shi et al., Sirius, USENIX ATC 2025 (the chain; what its program solves has arrivals in the place of departures at one
/// point); Neuts, Matrix-Geometric Solutions in Stochastic Models, 1981.
#pragma once

#include "scheduler/units.hpp"

namespace sluice::scheduler {

struct partial_warmth {
  double arrivals_per_s = 0.0;
  seconds service{0.0};
  seconds load{0.0};          ///< of a request that finds nothing kept; 0: as if it were warm
  seconds idle_timeout{0.0};  ///< on average
  double cold_share = 1.0;    ///< α: of the requests to a released model, those that need the load
};

struct partial_warmth_result {
  double share_within = 0.0;     ///< of the responses within the latency; 0 at utilisation ≥ 1
  double released_share = 0.0;   ///< of the time
  double warm_idle_share = 0.0;  ///< of the time
  seconds mean_response{0.0};
};

[[nodiscard]] partial_warmth_result solve(partial_warmth const& chain, seconds latency);

}  // namespace sluice::scheduler
