#include "scheduler/warm_policy.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>

#include "scheduler/calibration.hpp"
#include "scheduler/queueing.hpp"

namespace sluice::scheduler {

namespace {

// A change must release a tenth more than now, and at least a thousandth of the time.
constexpr double relative_gain = 0.1;
constexpr double absolute_gain = 0.001;
// A shorter timeout is taken only if a tenth of the permitted misses stay unused.
constexpr double spare_share = 0.1;
// Below this share of admitted requests nothing new would be learned about them.
constexpr double smallest_admit_share = 0.05;
// Utilisation to which an overloaded model is brought back if its service time alone misses the
// objective.
constexpr double sustainable_utilisation = 0.9;

/// What every candidate is judged by.
struct traffic {
  queue_load met;        // at the rate that waits are planned for
  queue_load long_term;  // at the rate that memory is counted by
  attainment_at_rate at;
  gap_histogram::sums gaps;
  double log_odds;
};

prediction predict(warm_inputs const& in, traffic const& t, seconds timeout) {
  auto const odds = t.gaps.beyond(timeout, t.long_term.arrivals_per_s);
  cycle const round = cycle_of(t.long_term, odds.exceed);
  // The cycle's released fraction, with the observed share of idle time in place of
  // Poisson's.
  double const released =
      odds.exceed > 0.0 ? round.released_fraction * odds.time_share / odds.exceed : 0.0;
  prediction p;
  p.idle_timeout = timeout;
  p.exceed = odds.exceed;
  p.uncorrected = t.at.share_within(odds.exceed);
  p.attainment = corrected_share(p.uncorrected, t.log_odds);
  p.released_fraction = std::min(1.0, released);
  p.released_bytes = p.released_fraction * static_cast<double>(in.weight_bytes);
  p.loads_per_s = round.loads_per_s;
  p.mean_wait = mean_wait(t.met, odds.exceed);
  return p;
}

prediction const* most_released(std::vector<prediction> const& all, double least_attainment) {
  prediction const* best = nullptr;
  for (auto const& p : all) {
    if (p.attainment >= least_attainment &&
        (best == nullptr || p.released_fraction > best->released_fraction)) {
      best = &p;
    }
  }
  return best;
}

shortfall why_not(warm_inputs const& in, attainment_at_rate const& at, double target) {
  bool const has_neighbours = in.beside.by != predicted_by::alone;
  auto const alone = [&in] {
    return attainment_model{in.service, in.load, in.goal.latency}.at(in.arrivals_per_s);
  };
  if (at.utilisation >= 1.0) {
    return has_neighbours && alone().warm >= target ? shortfall::neighbours : shortfall::overloaded;
  }
  if (in.service.cdf(in.goal.latency) < target) {
    return shortfall::service_too_slow;
  }
  if (at.warm < target) {
    return has_neighbours && alone().warm >= target ? shortfall::neighbours : shortfall::queueing;
  }
  return corrected_share(at.warm, in.log_odds) < target ? shortfall::observed : shortfall::max_idle;
}

/// At an objective of that latency an always warm model keeps it.
bool keeps(warm_inputs const& in, double target, seconds latency) {
  attainment_model const model{in.service, in.load, latency, in.beside};
  return corrected_share(model.at(in.arrivals_per_s).warm, in.log_odds) >= target;
}

seconds latency_that_does(warm_inputs const& in, double target) {
  constexpr int doublings = 10;
  constexpr int halvings = 5;
  seconds low = in.goal.latency;
  seconds high = 2.0 * low;
  for (int i = 0; !keeps(in, target, high); ++i) {
    if (i == doublings) {
      return forever;
    }
    low = high;
    high *= 2.0;
  }
  for (int i = 0; i < halvings; ++i) {
    seconds const middle = 0.5 * (low + high);
    (keeps(in, target, middle) ? high : low) = middle;
  }
  return high;
}

/// The largest rate at which those who are admitted are in time.
double sustainable_rate(warm_inputs const& in, attainment_model const& model, double target) {
  double const alone = in.service.cdf(in.goal.latency);
  if (alone < target) {
    return sustainable_utilisation / in.service.mean().count();
  }
  double const share = uncorrected_share(target, in.log_odds);
  return alone < share ? 0.0 : model.largest_warm_rate(share, in.arrivals_per_s);
}

void shed(warm_inputs const& in, attainment_model const& model, double target, warm_decision& d) {
  double const wanted = d.feasible() ? in.arrivals_per_s : sustainable_rate(in, model, target);
  double const share = in.arrivals_per_s > 0.0 ? wanted / in.arrivals_per_s : 1.0;
  d.admit_share = std::clamp(std::max(smallest_admit_share, share), in.least_admitted,
                             std::max(in.least_admitted, in.most_admitted));
  if (d.admit_share >= 1.0) {
    d.admit_share = 1.0;  // refusing some would not help the others: they do not wait for them
    return;
  }
  // If arrivals ceased now, the estimate would be back at what is sustainable after this time.
  d.retry_after = seconds{std::clamp(-std::log(d.admit_share) * in.rate_memory.count(), 1.0, 60.0)};
}

}  // namespace

void idle_limits::check() const {
  if (!(min_idle.count() >= 0.0) || min_idle == forever) {
    throw std::invalid_argument("min_idle must be a finite number of seconds >= 0; got " +
                                std::to_string(min_idle.count()));
  }
  if (!(max_idle >= min_idle)) {
    throw std::invalid_argument("max_idle must be at least min_idle (" +
                                std::to_string(min_idle.count()) + " s); got " +
                                std::to_string(max_idle.count()) + " s");
  }
}

std::string_view to_string(shortfall reason) noexcept {
  switch (reason) {
    case shortfall::none:
      return "none";
    case shortfall::overloaded:
      return "overloaded";
    case shortfall::queueing:
      return "queueing";
    case shortfall::neighbours:
      return "neighbours";
    case shortfall::service_too_slow:
      return "service_too_slow";
    case shortfall::observed:
      return "observed";
    case shortfall::max_idle:
      return "max_idle";
  }
  return "unknown";
}

std::vector<seconds> candidate_timeouts(idle_limits const& limits) {
  limits.check();
  constexpr double shortest = 0.01;
  constexpr double longest = 86400.0;
  std::vector<seconds> result{limits.min_idle};
  for (double t = shortest; t <= longest; t *= std::numbers::sqrt2) {
    if (seconds{t} > limits.min_idle && seconds{t} < limits.max_idle) {
      result.emplace_back(t);
    }
  }
  if (limits.max_idle > limits.min_idle) {
    result.push_back(limits.max_idle);
  }
  return result;
}

warm_decision decide(warm_inputs const& in) {
  in.goal.check();
  double const long_run = in.long_run_rate_per_s.value_or(in.arrivals_per_s);
  attainment_model const model{in.service, in.load, in.goal.latency, in.beside};
  traffic t{.met = {.arrivals_per_s = in.arrivals_per_s, .service = in.service, .load = in.load},
            .long_term = {.arrivals_per_s = long_run, .service = in.service, .load = in.load},
            .at = model.at(in.arrivals_per_s),
            .gaps = in.gaps.summed(),
            .log_odds = in.log_odds};

  warm_decision d;
  d.required_share = required_share(in.goal, long_run);
  d.by = in.beside.by;
  d.log_odds = in.log_odds;
  d.warm_attainment = t.at.warm;
  d.cold_attainment = t.at.cold;
  d.utilisation = t.at.utilisation;
  d.arrivals_per_s = in.arrivals_per_s;
  d.long_run_rate_per_s = long_run;
  d.gaps_observed = in.gaps.weight();
  d.service_mean = in.service.mean();
  d.service_scv = in.service.scv();
  d.load_mean = in.load.mean();
  d.load_scv = in.load.scv();
  for (seconds const timeout : candidate_timeouts(in.limits)) {
    d.candidates.push_back(predict(in, t, timeout));
  }

  prediction const longest = d.candidates.back();
  double const target = d.required_share;
  prediction const* const spare =
      most_released(d.candidates, target + spare_share * (1.0 - target));
  prediction const* const any = most_released(d.candidates, target);
  if (any == nullptr) {
    d.chosen = longest;
    d.reason = why_not(in, t.at, target);
    if (in.explains) {
      d.would_do = {.rate_per_s = model.largest_warm_rate(uncorrected_share(target, in.log_odds),
                                                          in.arrivals_per_s),
                    .latency = latency_that_does(in, target)};
    }
  } else {
    d.chosen = spare != nullptr ? *spare : *any;
  }
  if (in.reject_on_miss && in.service_measured) {
    shed(in, model, target, d);
  }
  if (d.admit_share < 1.0) {  // what becomes of those that are admitted, who wait for nobody else
    t.met.arrivals_per_s *= d.admit_share;
    t.at = model.at(t.met.arrivals_per_s);
    d.chosen = predict(in, t, d.chosen.idle_timeout);
    d.chosen.attainment *= d.admit_share;
  }
  if (in.current) {
    seconds const clamped = std::clamp(*in.current, in.limits.min_idle, in.limits.max_idle);
    prediction const present = predict(in, t, clamped);
    bool const gains = d.chosen.released_fraction >=
                       present.released_fraction * (1.0 + relative_gain) + absolute_gain;
    if (d.feasible() && present.attainment >= target && !gains) {
      d.chosen = present;
    }
    d.changed = d.chosen.idle_timeout != *in.current;
  } else {
    d.changed = true;
  }
  return d;
}

}  // namespace sluice::scheduler
