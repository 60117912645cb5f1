/// Decides how long a model without requests stays on the device before its memory goes back to
/// training.
///
/// For each candidate timeout the policy predicts the share of requests answered in time, the
/// memory released to training and the loads per second, and takes the timeout that releases most
/// while the share meets the objective. If none does the decision says why. Where more requests are late than the objective permits, a
/// timeout will do, too, whose cold starts add at most a tenth to those. Hysteresis: a timeout that still meets the objective is left
/// only for one that releases noticeably more and meets it with something to spare.
///
/// Whoever can leave a part of a model's weights where they are when it goes, so that less has to be loaded the next time, has timeouts
/// compared for several such parts (`resident_parts`).
///
///   auto decided = decide({.goal = slo,
///                          .weight_bytes = 90_MiB,
///                          .arrivals_per_s = 2.0,
///                          .service = distribution::gamma(20ms, 1.0),
///                          .load = distribution::gamma(1s, 0.0)});
///   decided.chosen.idle_timeout;   // how long it may stay without a request
///
/// A pure function of its inputs; the decision carries all it was made from, for the log and for
/// `sluice status`. Throws `std::invalid_argument` for an invalid objective, limits or rate.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "scheduler/attainment.hpp"
#include "scheduler/distribution.hpp"
#include "scheduler/estimators.hpp"
#include "scheduler/periods.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// The operator's bounds on an idle timeout. `min_idle` also limits thrashing: as long as a load
/// takes is a sane floor.
struct idle_limits {
  seconds min_idle{0.0};
  seconds max_idle = forever;

  void check() const;
};

struct warm_inputs {
  objective goal{};
  idle_limits limits{};
  std::uint64_t weight_bytes = 0;
  double arrivals_per_s = 0.0;  ///< what waits are planned for: the rate that a request meets
  std::optional<double> long_run_rate_per_s{};  ///< what released memory and loads are counted by;
                                                ///< `arrivals_per_s` if none
  distribution service{};                       ///< without load time
  distribution load{};                          ///< demand for memory until ready
  seconds handover{0.0};  ///< part of `load` that memory takes to arrive, where none is free
  gap_histogram gaps{};   ///< as observed; empty means Poisson
  std::optional<seconds> current{};  ///< the timeout in force
  /// Part of `load`, less where parts have stayed; none: all but the handover.
  std::optional<seconds> copies{};
  unsigned resident_parts =
      1;  ///< a model that goes may leave any number below of so many equal parts of its weights
  unsigned current_parts = 0;     ///< of them, as was decided before
  bool reject_on_miss = false;    ///< refuse what would miss, instead of queueing it
  bool service_measured = false;  ///< `service` is from measurements; nothing is refused on a prior
  shared_load beside{};           ///< what else its device computes
  /// Of requests, as seen: in the objective's last window or over many, whichever is more.
  std::optional<double> missed_share{};
  double log_odds = 0.0;        ///< correction of predicted shares (calibration.hpp)
  double least_admitted = 0.0;  ///< bounds of the share of requests to admit, with `reject_on_miss`
  double most_admitted = 1.0;
  bool explains = false;      ///< if nothing meets the objective, say what would (`remedy`)
  seconds rate_memory{10.0};  ///< time constant of the arrival estimate, for `retry_after`
  /// Whoever asks loads models before they are asked for, and requests come in bunches, one each period.
  std::optional<periodic_arrivals> periodic{};
  bool prewarms = false;  ///< as was decided before
};

struct prediction {
  seconds idle_timeout{0.0};
  unsigned parts = 0;        ///< of `resident_parts`, those that stay when the model goes
  double exceed = 0.0;       ///< P(idle gap > timeout)
  double attainment = 0.0;   ///< share of requests within the latency; the refused are not
  double uncorrected = 0.0;  ///< the same of those that are admitted, before it is corrected
  bool will_do = false;  ///< meets the objective, or its cold starts add little to what misses it
  double released_fraction =
      0.0;  ///< share of time in which training has the memory, of memory-time where a part stays
  double released_bytes = 0.0;  ///< the same in bytes: weights × fraction
  double loads_per_s = 0.0;
  seconds mean_wait{0.0};
};

/// The model goes after each bunch of requests, and is loaded before the next one is expected.
struct prewarming {
  seconds hold{0.0};  ///< idle for so long it goes
  seconds lead{
      0.0};  ///< a load takes no longer, but for rare ones: it begins so long before the first request may come
};

/// Why no permitted timeout meets the objective.
enum class shortfall {
  none,              ///< one does
  overloaded,        ///< more work arrives than one server can do
  queueing,          ///< even an always warm model answers too few in time, because requests queue
  neighbours,        ///< it would answer enough alone, but waits for other models of its device
  service_too_slow,  ///< even a request that finds the model warm and idle misses too often
  observed,          ///< it should be met, but the answers that were seen say otherwise
  max_idle,          ///< an always warm model would meet it, but `max_idle` releases the model
};
[[nodiscard]] std::string_view to_string(shortfall reason) noexcept;

struct warm_decision {
  prediction chosen;
  std::optional<prewarming>
      prewarm{};                 ///< what `chosen` is predicted for, with `hold` for its timeout
  seconds unaided_timeout{0.0};  ///< what is best without it; else that of `chosen`
  unsigned unaided_parts = 0;    ///< likewise
  bool changed = false;          ///< differs from what is in force
  shortfall reason = shortfall::none;
  [[nodiscard]] bool feasible() const noexcept { return reason == shortfall::none; }

  /// What would meet the objective, each by itself; 0 and `forever`: nothing of that kind. Only if asked for.
  struct remedy {
    double rate_per_s = 0.0;   ///< at most so many requests of the model
    seconds latency{forever};  ///< a promise of that latency
  };
  std::optional<remedy> would_do;

  /// Share of requests to admit; below one only if refusing the others lets the admitted ones meet
  /// the objective.
  double admit_share = 1.0;
  seconds retry_after{0.0};  ///< for the refused

  double required_share = 0.0;  ///< what `attainment` had to meet
  /// Of requests, those that may be late, for whoever divides by it.
  [[nodiscard]] double permitted_share() const noexcept;
  predicted_by by = predicted_by::alone;
  double log_odds = 0.0;  ///< by which predictions were corrected
  double warm_attainment = 0.0;
  double cold_attainment =
      0.0;  ///< of a request that finds the model released, but for the parts that stay
  double free_gain = 0.0;  ///< by how much that is more where memory is free
  double utilisation = 0.0;
  double arrivals_per_s = 0.0;
  double long_run_rate_per_s = 0.0;
  double gaps_observed = 0.0;
  seconds service_mean{0.0};
  double service_scv = 0.0;
  seconds load_mean{0.0};  ///< of what does not stay
  double load_scv = 0.0;
  std::vector<prediction> candidates;  ///< all that were compared, by parts, then by timeout
};

/// Timeouts worth comparing: `min_idle`, `max_idle`, and a fixed geometric series (ratio √2)
/// between them. The series does not depend on the data, so that decisions of successive ticks are
/// comparable.
[[nodiscard]] std::vector<seconds> candidate_timeouts(idle_limits const& limits);

[[nodiscard]] warm_decision decide(warm_inputs const& in);

}  // namespace sluice::scheduler
