/// One server, first come first served, Poisson arrivals, general service times (M/G/1), whose
/// model is released after an idle timeout and loaded again (the *setup*) by the next arrival.
/// Closed forms for means, and the wait's tail.
///
/// "Wait" is the time before a request's own service begins; a load that it sits through counts as
/// waiting. The response time is the wait plus the request's own service. The queue is stable
/// exactly when the utilisation is below one, whatever the timeout; at or above one waits are
/// `forever` and nothing is ever released.
///
///   queue_load demand{.arrivals_per_s = 0.5,
///                     .service = distribution::gamma(100ms, 1.0),
///                     .load = distribution::gamma(2s, 0.0)};
///   mean_wait(demand, poisson_exceed(0.5, 3s));                     // 0.5525 s
///   cycle_of(demand, poisson_exceed(0.5, 3s)).released_fraction;   // 0.1733
///
/// Pure functions: no state, no clock, any thread. They throw `std::invalid_argument` for a
/// negative or NaN rate.
///
/// Sources. Pollaczek–Khinchine: Kleinrock, Queueing Systems I, 5.6. Exceptional first service:
/// Welch, Operations Research 12 (1964). Idle timeout: by decomposition (Fuhrmann and Cooper,
/// Operations Research 33 (1985)); derivation in docs/scheduler.md. Teardown, gathering and
/// vacations: the same decomposition, by which the extra wait is the integral of those present over a
/// period without service, over λ times its length. Exponential tail: Lundberg's exponent, Asmussen,
/// Applied Probability and Queues, XIII.5.
#pragma once

#include "scheduler/distribution.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

struct queue_load {
  double arrivals_per_s = 0.0;
  distribution service{};
  distribution load{};

  [[nodiscard]] double utilisation() const noexcept {
    return arrivals_per_s * service.mean().count();
  }
};

/// p = P(idle gap > timeout) for Poisson arrivals.
[[nodiscard]] double poisson_exceed(double arrivals_per_s, seconds idle_timeout) noexcept;

/// Mean wait of a model that is always warm (Pollaczek–Khinchine).
[[nodiscard]] seconds mean_warm_wait(queue_load const& demand);

/// Mean wait when each idle gap outlasts the timeout with probability `exceed` (p). `exceed` 0 is
/// always warm, 1 releases at once.
[[nodiscard]] seconds mean_wait(queue_load const& demand, double exceed);

/// What one round of idle → (released → loading) → busy → idle looks like on average.
struct cycle {
  seconds length{0.0};             ///< from the start of one idle gap to the start of the next
  double released_fraction = 0.0;  ///< share of time in which the memory is training's
  double loads_per_s = 0.0;
  double cold_or_loading = 0.0;  ///< share of requests that arrive to a released or loading model
};
[[nodiscard]] cycle cycle_of(queue_load const& demand, double exceed);

/// With a release that takes `teardown` and cannot be taken back: who comes meanwhile waits for the rest of it, and for the
/// load. Arrivals must be Poisson during the teardown.
struct teardown_effect {
  seconds mean_wait{0.0};
  double held_fraction = 1.0;  ///< share of time in which the memory is not training's
};
[[nodiscard]] teardown_effect with_teardown(queue_load const& demand, double exceed,
                                            seconds teardown);

/// Released whenever idle, and loaded again only once `requests` (at least one) wait (N-policy).
[[nodiscard]] seconds mean_wait_of_gathering(queue_load const& demand, unsigned requests);

/// Always warm, on a device that does something else whenever the queue is empty, again and again, and does not interrupt it: a
/// step of training (multiple vacations).
[[nodiscard]] seconds mean_wait_behind(queue_load const& demand, distribution const& elsewhere);

/// The largest p = P(idle gap > timeout) that makes the mean wait at most `extra` longer than always warm; 1 if every does.
[[nodiscard]] double exceed_for_extra_wait(queue_load const& demand, seconds extra);

/// The timeout with that p for Poisson arrivals; `forever` for 0.
[[nodiscard]] seconds poisson_timeout(double arrivals_per_s, double exceed) noexcept;

/// P(wait > t) ≈ min(utilisation, prefactor · e^{−decay t}), of a model that is always warm: who
/// finds it idle does not wait at all, which a prefactor that fits the far tail does not know.
struct wait_tail {
  double utilisation = 0.0;
  double prefactor = 0.0;
  double decay_per_s = 0.0;

  [[nodiscard]] double probability_above(seconds t) const noexcept;
  /// The t below which a share `q` in (0, 1) of the waits lies; never negative.
  [[nodiscard]] seconds quantile(double q) const noexcept;
};

/// Lundberg's asymptotically exact tail. Needs the service distribution's moment generating function, so a
/// distribution without exponential moments must come as a sample. At utilisation ≥ 1 the tail is one
/// everywhere (decay 0).
[[nodiscard]] wait_tail lundberg_tail(queue_load const& demand);

}  // namespace sluice::scheduler
