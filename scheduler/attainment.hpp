/// P(response time ≤ latency) of a model with idle timeout and load time, and the share that an
/// objective asks for.
///
/// The response time's distribution is exact for Poisson arrivals; it is evaluated on a grid of 128 steps up
/// to `latency`, with probability mass split between grid points so that every mean is kept.
/// Building the object costs well under a millisecond; asking it for one more rate less; asking the
/// answer for one more timeout is a division.
///
/// Where others are computed by the same server, or beside it, `shared_load` says so: the wait is that for all of them then, exactly for
/// models that are always warm; that with a cold start the others go on meanwhile is met by the same wait behind it.
///
///   attainment_model model{service, load, 200ms};
///   auto at = model.at(/*arrivals_per_s=*/0.5);
///   at.share_within(poisson_exceed(0.5, 30s));   // share of requests answered within 200 ms
///
/// `share_within` never rises with `exceed`, hence never falls when the idle timeout grows.
///
/// Immutable after construction. Derivation in docs/scheduler.md; geometric compound by Panjer's
/// recursion (ASTIN Bulletin 12, 1981); mean-preserving split: Gerber, Insurance: Mathematics and
/// Economics 1 (1982).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "scheduler/distribution.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// The prediction at one arrival rate. Shares are probabilities of a response within the latency.
struct attainment_at_rate {
  double arrivals_per_s = 0.0;
  double utilisation = 0.0;
  double load_mean_s = 0.0;
  double idle_share = 0.0;  ///< of time in which no request of the model's own waits or is computed
  double warm = 0.0;        ///< of a request to a model that is always warm
  double idle = 0.0;        ///< that finds the model warm and without another request
  double cold = 0.0;        ///< that finds the model released: load, then service
  double delayed = 0.0;     ///< that queues behind a cold start

  /// Overall share when an idle gap outlasts the timeout with probability `exceed`; 0 at
  /// utilisation ≥ 1.
  [[nodiscard]] double share_within(double exceed) const noexcept;
};

/// How a prediction takes account of the other models of a device.
enum class predicted_by {
  alone,            ///< there is none that asks for anything
  classes_in_turn,  ///< one computation at a time, first come first served: in closed form
  simulation        ///< several at once, with the slow-downs that were measured
};
[[nodiscard]] std::string_view to_string(predicted_by how) noexcept;

/// Of one model of several on a device (shared_executors.hpp makes it).
struct shared_load {
  predicted_by by = predicted_by::alone;
  double arrivals_per_s = 0.0;                    ///< of all models together
  std::shared_ptr<distribution const> service{};  ///< of whoever comes, as one server would have it
  double own_per_s = 0.0;                         ///< of `arrivals_per_s`
  double speed = 1.0;        ///< of that one server, over one that computes as the model's own does
  distribution waits{};      ///< simulated: what a request takes beyond its service alone
  double utilisation = 0.0;  ///< simulated
  double alone_factor = 1.0;  ///< simulated: the service alone, as a share of that measured
};

class attainment_model {
 public:
  /// Throws `std::invalid_argument` unless latency is positive and finite.
  attainment_model(distribution const& service, distribution const& load, seconds latency,
                   shared_load const& beside = {});

  /// At so many arrivals of the model's own; the others' stay.
  [[nodiscard]] attainment_at_rate at(double arrivals_per_s) const;

  /// Of a request that finds the model released and everything else idle, did its load take that.
  [[nodiscard]] double cold_after(distribution const& load) const;

  /// The largest arrival rate at which an always warm model answers a share of at least `share` in
  /// time, searched up to `limit_per_s`. 0 if its service time alone misses.
  [[nodiscard]] double largest_warm_rate(double share, double limit_per_s) const;

 private:
  using masses = std::vector<double>;
  [[nodiscard]] masses waits(double arrivals_per_s) const;
  [[nodiscard]] double utilisation(double arrivals_per_s) const noexcept;
  /// Waits have to be known for the present rate.
  [[nodiscard]] double mean_response_s(double arrivals_per_s) const noexcept;

  shared_load beside_;
  double service_mean_s_;
  double service_square_s2_;
  double load_mean_s_;
  masses residual_;  // of a service of its own in progress, at a random instant of it
  masses residual_of_all_;
  masses simulated_waits_;
  masses loading_;
  double step_s_;  // of the grid
  // Rest of a load in progress, plus the service of the request that caused it.
  masses behind_load_;
  masses within_;  // P(service ≤ latency − grid point)
  double cold_;
};

/// What the operator promises. In every window of that length, at least `percentile` of the
/// requests are answered within `latency`; and at least `attainment` of all windows keep that.
struct objective {
  double percentile = 0.99;  ///< in (0, 1]
  seconds latency{0.0};
  double attainment = 0.99;  ///< in (0, 1]
  seconds window{300.0};

  /// Throws `std::invalid_argument` with a sentence that names the member and the range it must be
  /// in.
  void check() const;
};

/// The long-run share of requests within the latency that keeps `goal`, at this arrival rate.
///
/// A window holds n = max(1, rate · window) requests, of which (1 − percentile) · n may miss.
/// Misses are taken as Poisson, so the promise holds in a share `attainment` of the windows when
/// the long-run miss share is at most μ/n, with Q(1 + (1 − percentile) n, μ) = attainment (Q: the
/// incomplete gamma function, which interpolates between whole numbers of misses). Tends to
/// `percentile` for large windows and to `attainment` when a window holds one request; never below
/// their product, which the promise implies. An attainment above 0.999 counts as 0.999: a promise
/// without exception has no prediction that meets it.
[[nodiscard]] double required_share(objective const& goal, double arrivals_per_s);

}  // namespace sluice::scheduler
