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
// Where more is missed than the objective permits, cold starts may add a tenth to that.
constexpr double added_misses = 0.1;
// Cold starts are judged at this utilisation where more work comes than one server can do: that passes.
constexpr double busiest = 0.95;
// Below this share of admitted requests nothing new would be learned about them.
constexpr double smallest_admit_share = 0.05;
// Utilisation to which an overloaded model is brought back if its service time alone misses the
// objective.
constexpr double sustainable_utilisation = 0.9;

/// What every candidate of one number of resident parts is judged by.
struct traffic {
  queue_load met;        // at the rate that waits are planned for
  queue_load long_term;  // at the rate that memory is counted by
  attainment_at_rate at;
  gap_histogram::sums gaps;
  double log_odds;
  unsigned parts = 0;
  double resident_share = 0.0;
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
  p.parts = t.parts;
  p.exceed = odds.exceed;
  p.uncorrected = t.at.share_within(odds.exceed);
  p.attainment = corrected_share(p.uncorrected, t.log_odds);
  p.released_fraction = std::min(1.0, released) * (1.0 - t.resident_share);
  p.released_bytes = p.released_fraction * static_cast<double>(in.weight_bytes);
  p.loads_per_s = round.loads_per_s;
  p.mean_wait = mean_wait(t.met, odds.exceed);
  return p;
}

seconds clamped_to(idle_limits const& limits, seconds timeout) {
  return std::clamp(timeout, limits.min_idle, limits.max_idle);
}

bool gains_over(prediction const& present, prediction const& other) {
  return other.released_fraction >=
         present.released_fraction * (1.0 + relative_gain) + absolute_gain;
}

/// Of `lead` there is enough for most loads; the margin of a window is for the others.
constexpr double load_deviations = 2.0;

/// If the model, of which nothing stays, is there from before a bunch is expected until it has come. Requests find it gone if they begin a bunch at another time.
std::optional<prediction> predict_prewarmed(warm_inputs const& in, traffic const& t,
                                            prewarming const& how) {
  auto const& is = *in.periodic;
  double const period_s = is.period.count();
  seconds const waits_in_vain = how.lead + 2.0 * is.margin;
  if (waits_in_vain > in.limits.max_idle) {
    return std::nullopt;
  }
  double const bunches = 1.0 - is.left_out;  // of a period, on time
  double const others = bunches * is.unexpected / std::max(1e-3, 1.0 - is.unexpected);
  double const used_s = (is.span + in.service.mean() + how.hold).count();
  double const held_s = bunches * ((how.lead + is.margin).count() + used_s) +
                        is.left_out * waits_in_vain.count() +
                        others * (in.load.mean().count() + used_s);
  prediction p;
  p.idle_timeout = how.hold;
  p.exceed = std::min(1.0, is.unexpected / is.requests);
  p.uncorrected = t.at.share_within(p.exceed);
  p.attainment = corrected_share(p.uncorrected, t.log_odds);
  p.released_fraction = std::max(0.0, 1.0 - held_s / period_s);
  p.released_bytes = p.released_fraction * static_cast<double>(in.weight_bytes);
  p.loads_per_s = (1.0 + others) / period_s;
  p.mean_wait = mean_wait(t.met, p.exceed);
  return p;
}

/// Which timeouts will do.
///
/// One that meets `target`. And where more misses are seen than that permits, one whose cold starts are few beside them: to hold the
/// model would mend little. They are judged at the mean rate of the gaps that were seen, so that the timeout does not follow the burst
/// that is there now: releasing in one part of the time and holding in another gives up more than one timeout between.
class requirement {
 public:
  requirement(warm_inputs const& in, traffic const& t, attainment_model const& model, double target)
      : target_(target) {
    double const permitted = 1.0 - target;
    double const warm = t.at.utilisation < 1.0 ? corrected_share(t.at.warm, in.log_odds) : 0.0;
    double const missed = in.missed_share.value_or(1.0 - warm);
    if (missed <= permitted) {
      return;
    }
    double rate = in.gaps.mean_rate_per_s().value_or(t.long_term.arrivals_per_s);
    if (double const busy = model.at(rate).utilisation; busy >= 1.0) {
      rate *= busiest / busy;
    }
    auto const usual = model.at(rate);
    if (usual.utilisation < 1.0) {  // else it is others' work
      usual_ = usual;
      least_ = usual.share_within(0.0) - added_misses * missed;
    }
  }

  [[nodiscard]] bool met(prediction const& p, double spare = 0.0) const {
    return p.attainment >= target_ + spare * (1.0 - target_) ||
           (usual_ && usual_->share_within(p.exceed) >= least_);
  }

 private:
  double target_;
  std::optional<attainment_at_rate> usual_{};
  double least_ = 1.0;
};

/// Taken by what timeouts are taken by: it keeps the promise, and releases noticeably more; or it keeps the promise where no timeout
/// that is permitted does.
void prewarm(warm_inputs const& in, traffic const& t, requirement const& wanted, warm_decision& d) {
  prewarming const how{.hold = clamped_to(in.limits, in.periodic->quiet),
                       .lead = in.load.mean() * (1.0 + load_deviations * std::sqrt(in.load.scv()))};
  auto const planned = predict_prewarmed(in, t, how);
  if (!planned || !wanted.met(*planned, in.prewarms ? 0.0 : spare_share)) {
    return;
  }
  bool const releases_more = in.prewarms ? planned->released_fraction > d.chosen.released_fraction
                                         : gains_over(d.chosen, *planned);
  if (releases_more || !wanted.met(d.chosen)) {
    d.chosen = *planned;
    d.chosen.will_do = true;
    d.prewarm = how;
    if (d.reason == shortfall::max_idle) {
      d.reason = shortfall::none;
    }
  }
}

/// What remains of a load where a share of the weights is there.
distribution load_behind(warm_inputs const& in, double resident_share) {
  double const mean_s = in.load.mean().count();
  if (resident_share <= 0.0 || mean_s <= 0.0) {
    return in.load;
  }
  double const copies_s = in.copies.value_or(in.load.mean() - in.handover).count();
  return in.load.scaled(1.0 - resident_share * std::clamp(copies_s / mean_s, 0.0, 1.0));
}

/// What is predicted where one number of resident parts stays, and which of it will do.
struct outlook {
  attainment_model model;
  traffic t;
  double cold;  // share in time of who finds the rest released
  requirement wanted;
};

outlook outlook_of(warm_inputs const& in, unsigned parts, gap_histogram::sums const& gaps,
                   double target) {
  double const share = static_cast<double>(parts) / in.resident_parts;
  auto const load = load_behind(in, share);
  attainment_model const model{in.service, load, in.goal.latency, in.beside};
  traffic const t{
      .met = {.arrivals_per_s = in.arrivals_per_s, .service = in.service, .load = load},
      .long_term = {.arrivals_per_s = in.long_run_rate_per_s.value_or(in.arrivals_per_s),
                    .service = in.service,
                    .load = load},
      .at = model.at(in.arrivals_per_s),
      .gaps = gaps,
      .log_odds = in.log_odds,
      .parts = parts,
      .resident_share = share};
  return {model, t, t.at.cold, requirement{in, t, model, target}};
}

prediction const* most_released(std::vector<prediction> const& all,
                                std::vector<outlook> const& outlooks, double spare = 0.0) {
  prediction const* best = nullptr;
  for (auto const& p : all) {
    if (p.will_do && (best == nullptr || p.released_fraction > best->released_fraction) &&
        (spare <= 0.0 || outlooks[p.parts].wanted.met(p, spare))) {
      best = &p;
    }
  }
  return best;
}

/// How cold starts are where the model is left as was chosen.
void describe_cold_start(warm_inputs const& in, outlook const& chosen, warm_decision& d) {
  auto const& load = chosen.t.met.load;
  d.cold_attainment = chosen.cold;
  d.load_mean = load.mean();
  d.load_scv = load.scv();
  if (in.handover.count() > 0.0 && load.mean().count() > 0.0) {
    double const rest = std::max(1e-3, 1.0 - in.handover / load.mean());
    d.free_gain =
        std::max(0.0, chosen.model.cold_after(load.scaled(rest)) - chosen.model.cold_after(load));
  }
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

double warm_decision::permitted_share() const noexcept {
  constexpr double least = 1e-4;
  return std::max(least, 1.0 - required_share);
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
  if (in.resident_parts == 0) {
    throw std::invalid_argument("resident_parts must be 1 or more; 1 is all or nothing");
  }
  double const long_run = in.long_run_rate_per_s.value_or(in.arrivals_per_s);
  double const target = required_share(in.goal, long_run);
  auto const gaps = in.gaps.summed();
  std::vector<outlook> outlooks;
  outlooks.reserve(in.resident_parts);
  for (unsigned parts = 0; parts < in.resident_parts; ++parts) {
    outlooks.push_back(outlook_of(in, parts, gaps, target));
  }
  auto const& bare = outlooks.front();

  warm_decision d;
  d.required_share = target;
  d.by = in.beside.by;
  d.log_odds = in.log_odds;
  d.warm_attainment = bare.t.at.warm;
  d.utilisation = bare.t.at.utilisation;
  d.arrivals_per_s = in.arrivals_per_s;
  d.long_run_rate_per_s = long_run;
  d.gaps_observed = in.gaps.weight();
  d.service_mean = in.service.mean();
  d.service_scv = in.service.scv();
  auto const timeouts = candidate_timeouts(in.limits);
  d.candidates.reserve(outlooks.size() * timeouts.size());
  for (auto const& each : outlooks) {
    for (seconds const timeout : timeouts) {
      d.candidates.push_back(predict(in, each.t, timeout));
      d.candidates.back().will_do = each.wanted.met(d.candidates.back());
    }
  }

  prediction const* const spare = most_released(d.candidates, outlooks, spare_share);
  prediction const* const any = most_released(d.candidates, outlooks);
  auto const& longest = d.candidates[timeouts.size() - 1];
  d.chosen = spare != nullptr ? *spare : any != nullptr ? *any : longest;
  if (longest.will_do && !gains_over(longest, d.chosen)) {
    d.chosen = longest;  // nothing is gained by cold starts
  }
  if (std::none_of(d.candidates.begin(), d.candidates.end(),
                   [target](prediction const& p) { return p.attainment >= target; })) {
    d.reason = why_not(in, bare.t.at, target);
    if (in.explains) {
      d.would_do = {.rate_per_s = bare.model.largest_warm_rate(
                        uncorrected_share(target, in.log_odds), in.arrivals_per_s),
                    .latency = latency_that_does(in, target)};
    }
  }
  if (in.reject_on_miss && in.service_measured) {
    shed(in, bare.model, target, d);
  }
  if (d.admit_share < 1.0) {  // what becomes of those that are admitted, who wait for nobody else
    for (auto& each : outlooks) {
      each.t.met.arrivals_per_s *= d.admit_share;
      each.t.at = each.model.at(each.t.met.arrivals_per_s);
    }
    d.chosen = predict(in, outlooks[d.chosen.parts].t, d.chosen.idle_timeout);
  }
  if (in.current) {
    auto const& as_it_is = outlooks[std::min(in.current_parts, in.resident_parts - 1)];
    prediction const present = predict(in, as_it_is.t, clamped_to(in.limits, *in.current));
    if (as_it_is.wanted.met(present) && !gains_over(present, d.chosen)) {
      d.chosen = present;
    }
    d.changed = d.chosen.idle_timeout != *in.current || d.chosen.parts != in.current_parts;
  } else {
    d.changed = true;
  }
  d.chosen.will_do = outlooks[d.chosen.parts].wanted.met(d.chosen);
  d.unaided_timeout = d.chosen.idle_timeout;
  d.unaided_parts = d.chosen.parts;
  if (in.periodic && d.admit_share >= 1.0) {
    prewarm(in, bare.t, bare.wanted, d);
  }
  d.changed = d.changed || d.prewarm.has_value() != in.prewarms;
  d.chosen.attainment *= d.admit_share;
  describe_cold_start(in, outlooks[d.chosen.parts], d);
  return d;
}

}  // namespace sluice::scheduler
