#include "scheduler/model_controller.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace sluice::scheduler {

namespace {

constexpr double bursty_dispersion = 2.0;
// A burst that alone would overload the server is planned for at this utilisation: it passes, a
// real overload does not.
constexpr double busiest_burst = 0.95;
// News: half more of what has been counted, up to so much at once; a mean that moves by a tenth; a rate by a quarter, and by
// as many standard deviations of its estimate.
constexpr std::uint64_t most_uncounted = 1024;
constexpr double moved_mean = 0.1;
constexpr double moved_rate = 0.25;
constexpr double noise_deviations = 5.0;
constexpr double one_day_s = 86400.0;
constexpr std::uint64_t surprising_answers = 20;
// What a cold start adds to is what is missed over so many windows of the objective.
constexpr double remembered_windows = 12.0;
constexpr double least_variance = 0.01;
// Where a prediction is corrected, the share of requests that is admitted changes so often in a window and by so much at once.
constexpr double steps_in_window = 20.0;
constexpr double fastest_fall = 0.8;
constexpr double fastest_rise = 0.05;
constexpr double least_by_observation = 0.25;
// Of a load: less, and its memory was free. What others took is a mean of so many.
constexpr double least_handover = 1e-4;
constexpr double remembered_handovers = 32.0;
// A cold start that is in time costs so much of one that is not, if it takes all the time there is.
constexpr double least_cold_cost = 0.01;

/// Of the request that causes it and of those that come meanwhile, each late by so much more often than warm; over what is permitted.
double cost_of_a_cold_start(warm_decision const& made, seconds latency) {
  double const late = std::max(0.0, made.warm_attainment - made.cold_attainment);
  double const waits = std::min(1.0, made.load_mean / latency);
  double const requests = 1.0 + made.long_run_rate_per_s * made.load_mean.count();
  return requests * (late + least_cold_cost * waits) / made.permitted_share();
}

bool many_more(std::uint64_t now, std::uint64_t before) {
  return now - before >= std::clamp<std::uint64_t>(before / 2, 1, most_uncounted);
}

seconds memory_of(objective const& goal) {
  constexpr seconds longest{1e9};
  return remembered_windows * std::min(goal.window, longest);
}

}  // namespace

model_controller::model_controller(model_settings const& settings, instant start)
    : settings_(settings),
      rates_(start),
      attempts_(rates_.fast_memory(), start),
      dispersions_{dispersion_index{seconds{1.0}, start}, dispersion_index{seconds{10.0}, start},
                   dispersion_index{seconds{60.0}, start}},
      services_(settings.service),
      loads_(settings.load),
      attained_(settings.goal.window, start),
      kept_(settings.goal.window, start),
      foretold_(settings.goal.window, start),
      admitted_(settings.goal.window, start),
      asked_(memory_of(settings.goal), start),
      missed_(memory_of(settings.goal), start),
      idle_timeout_(settings.limits.max_idle),
      calibration_(settings.goal.window),
      learned_(start),
      admission_changed_(start) {
  settings.goal.check();
  settings.limits.check();
  if (settings.resident_parts == 0) {
    throw std::invalid_argument("resident_parts must be 1 or more; 1 is all or nothing");
  }
}

void model_controller::note_arrival(instant now) {
  if (last_arrival_) {
    constexpr seconds longest{1e9};  // of a clock that is broken
    gaps_.add(std::max(seconds{0.0}, std::min(now - *last_arrival_, longest)));
  }
  last_arrival_ = last_arrival_ ? std::max(*last_arrival_, now) : now;
  rates_.count(now);
  for (auto& d : dispersions_) {
    d.count(now);
  }
  if (settings_.may_prewarm) {
    periods_.count(now);
    has_news_ = has_news_ || periods_.changes() != basis_.period_changes;
  }
  ++arrivals_;
  has_news_ = has_news_ || many_more(arrivals_, basis_.arrivals) || rate_has_moved(now);
}

/// Of one that comes again the first refusal has counted.
void model_controller::note_outcome(instant now, bool within, bool is_retry) {
  if (is_retry) {
    return;
  }
  attained_.add(now, within);
  asked_.count(now);
  if (!within) {
    missed_.count(now);
  }
}

/// In the last window or over many, whichever is more: to hold a model in a quiet window mends little where busy ones miss.
std::optional<double> model_controller::missed_share(instant now) {
  std::optional<double> most;
  if (auto const seen = attained_.read(now); seen.requests >= surprising_answers) {
    most = 1.0 - *seen.share();
  }
  double const asked = asked_.kept(now).events;
  if (asked >= static_cast<double>(surprising_answers)) {
    most = std::max(most.value_or(0.0), std::min(1.0, missed_.kept(now).events / asked));
  }
  return most;
}

void model_controller::on_refused_elsewhere(instant now, request_mark request,
                                            seconds retry_after) {
  attempts_.count(now);
  bool const is_retry = retries_.take(request, now);
  if (!is_retry) {
    note_arrival(now);
  }
  note_outcome(now, false, is_retry);
  retries_.on_refusal(request, now, retry_after);
}

void model_controller::on_turned_away(instant now, bool is_retry, request_mark request,
                                      seconds retry_after) {
  note_outcome(now, false, is_retry);
  note_answer(false);
  retries_.on_refusal(request, now, retry_after);
}

void model_controller::set_limits(idle_limits const& limits) {
  limits.check();
  settings_.limits = limits;
  prewarm_.reset();  // until it has been decided anew
  idle_timeout_ = std::clamp(idle_timeout_, limits.min_idle, limits.max_idle);
  has_news_ = true;
}

model_controller::admission model_controller::on_arrival(instant now, request_mark request,
                                                         std::optional<seconds> expected) {
  bool const is_retry = retries_.take(request, now);
  attempts_.count(now);
  if (!is_retry) {
    note_arrival(now);
  }
  is_foretold_ = is_foretold_ || expected;
  bool const admits = expected ? !breaks_promise(now, *expected) : takes_turn();
  admitted_.add(now, admits);
  if (admits) {
    if (expected) {
      foretold_.add(now, *expected <= settings_.goal.latency);
    }
    return {.is_retry = is_retry};
  }
  auto const retry_after = expected ? *expected - settings_.goal.latency : retry_after_;
  ++refused_;
  note_outcome(now, false, is_retry);
  retries_.on_refusal(request, now, retry_after);
  return {.admitted = false, .retry_after = retry_after, .is_retry = is_retry};
}

/// Whether it would be late, and too many of those that were admitted have been, or will be.
bool model_controller::breaks_promise(instant now, seconds expected) {
  if (!settings_.reject_on_miss || expected <= settings_.goal.latency || !helps_others_) {
    return false;
  }
  auto const is_spent = [&](attainment_window& window) {
    auto const seen = window.read(now);
    auto const late = static_cast<double>(seen.requests - seen.within + 1);
    return late > (1.0 - required_share_) * static_cast<double>(seen.requests + 1);
  };
  return is_spent(kept_) || is_spent(foretold_);
}

/// Of all that ask, a share.
bool model_controller::takes_turn() {
  if (admit_share_ >= 1.0) {
    return true;
  }
  admit_credit_ += admit_share_ * new_share_;
  if (admit_credit_ < 1.0) {
    return false;
  }
  admit_credit_ -= 1.0;
  return true;
}

void model_controller::on_service(instant now, seconds service, seconds response, bool is_retry) {
  on_late_service(service);
  bool const within = response <= settings_.goal.latency;
  kept_.add(now, within);
  note_outcome(now, within, is_retry);
  note_answer(within);
}

void model_controller::on_late_service(seconds service) {
  services_.add(service);
  bool const has_moved =
      services_.measured() &&
      std::abs(services_.mean().count() - basis_.service_s) >
          moved_mean * basis_.service_s + noise_deviations * services_.mean_deviation().count();
  has_news_ = has_news_ || has_moved || many_more(services_.count(), basis_.services);
}

void model_controller::on_failure(instant now, bool is_retry) {
  kept_.add(now, false);
  note_outcome(now, false, is_retry);
  note_answer(false);
}

void model_controller::note_answer(bool within) {
  ++answers_;
  answers_within_ += within ? 1 : 0;
  auto const n = static_cast<double>(answers_);
  double const over = static_cast<double>(answers_within_) - n * believed_;
  double const chance = std::sqrt(n * std::max(least_variance, believed_ * (1.0 - believed_)));
  has_news_ =
      has_news_ || (answers_ >= surprising_answers && std::abs(over) > noise_deviations * chance);
}

void model_controller::learn_from_answers(instant now) {
  if (is_foretold_ && admitted_share_ < 1.0) {  // what is predicted is of all, and these are chosen
    answers_ = answers_within_ = 0;
  }
  calibration_.add(now - learned_, answers_, answers_within_, predicted_);
  learned_ = std::max(learned_, now);
  answers_ = answers_within_ = 0;
}

void model_controller::on_load(instant /*now*/, seconds load, seconds handover,
                               double copied_share) {
  auto const part = std::clamp(handover, seconds{0.0}, load);
  auto whole = load;
  if (settings_.resident_parts > 1) {
    copies_.add(copied_share, load - part);
    whole += (1.0 - std::clamp(copied_share, 0.0, 1.0)) * copies_.of_all().value_or(seconds{0.0});
  }
  loads_.add(whole);
  has_news_ = has_news_ || many_more(loads_.count(), basis_.loads);
  handover_total_ += part;
  if (part > least_handover * load) {
    handovers_ = std::min(handovers_ + 1.0, remembered_handovers);
    handover_ += (part - handover_) / handovers_;
  }
}

experience model_controller::learnt(instant now) {
  learn_from_answers(now);
  experience result{.latency = settings_.goal.latency,
                    .window = settings_.goal.window,
                    .rates = rates_.kept(now),
                    .gaps = gaps_.kept(),
                    .periods = periods_.kept(now),
                    .services = services_.kept(),
                    .loads = loads_.kept(),
                    .handover = handover_,
                    .handovers = handovers_,
                    .attained = attained_.kept(now),
                    .corrections = calibration_.kept(),
                    .idle_timeout = decided_};
  std::transform(dispersions_.begin(), dispersions_.end(), result.dispersions.begin(),
                 [now](auto& each) { return each.kept(now); });
  return result;
}

void model_controller::recall(experience const& from, seconds age, instant now) {
  auto const is_duration = [](seconds value) { return value.count() >= 0.0; };
  if (!is_duration(from.handover) || !std::isfinite(from.handover.count()) ||
      !(from.handovers >= 0.0) || !is_duration(from.idle_timeout.value_or(seconds{0.0}))) {
    throw std::invalid_argument("handovers and timeouts must be numbers >= 0");
  }
  auto next = *this;
  next.rates_.recall(from.rates, age, now);
  next.attempts_.recall(from.rates.fast, age, now);
  next.gaps_.recall(from.gaps, age);
  for (std::size_t i = 0; i < dispersions_.size(); ++i) {
    next.dispersions_.at(i).recall(from.dispersions.at(i), age, now);
  }
  if (settings_.may_prewarm) {
    next.periods_.recall(from.periods, age, now);
  }
  next.prewarm_.reset();  // until it has been decided anew
  next.services_.recall(from.services, age);
  next.loads_.recall(from.loads, age);
  next.handover_ = from.handover;
  next.handovers_ = std::min(from.handovers, remembered_handovers);
  next.attained_.recall(from.attained, age, now);
  next.calibration_.recall(from.corrections, age);
  if (from.latency != settings_.goal.latency || from.window != settings_.goal.window) {
    next.attained_ = attainment_window{settings_.goal.window, now};
    next.calibration_ = calibration{settings_.goal.window};
  }
  if (from.idle_timeout) {
    next.decided_ =
        std::clamp(*from.idle_timeout, settings_.limits.min_idle, settings_.limits.max_idle);
    next.idle_timeout_ = *next.decided_;
  }
  auto const recalled = next.attained_.read(now);
  next.asked_.recall({.events = static_cast<double>(recalled.requests), .watched = 1.0},
                     seconds{0.0}, now);
  next.missed_.recall(
      {.events = static_cast<double>(recalled.requests - recalled.within), .watched = 1.0},
      seconds{0.0}, now);
  next.learned_ = now;
  next.has_news_ = true;
  *this = std::move(next);
}

// The rate that a request of the stream sees around itself, at the scale of what delays it: a
// window of length w that holds one request holds, on average, (dispersion − 1) more than one
// placed at random.
model_controller::burst model_controller::burst_around(instant now, distribution const& service,
                                                       distribution const& load) {
  double const slow = rates_.slow(now);
  double const idle_share = std::max(0.1, 1.0 - slow * service.mean().count());
  double const scale =
      std::max(load.mean().count(), service.mean().count() / (idle_share * idle_share));
  auto const distance = [&](dispersion_index const& d) {
    return std::abs(std::log(d.window().count() / std::max(scale, 1e-6)));
  };
  auto& nearest =
      *std::min_element(dispersions_.begin(), dispersions_.end(),
                        [&](auto const& a, auto const& b) { return distance(a) < distance(b); });
  burst result;
  result.dispersion = nearest.value(now);
  if (result.dispersion && *result.dispersion > bursty_dispersion) {
    result.rate_per_s = slow + (*result.dispersion - 1.0) / nearest.window().count();
    if (service.mean().count() > 0.0) {
      result.rate_per_s = std::min(result.rate_per_s, busiest_burst / service.mean().count());
    }
  }
  return result;
}

bool model_controller::rate_has_moved(instant now) const {
  double const planned = rates_.planned(now);
  return std::abs(std::log(planned / basis_.rate_per_s)) > basis_.rate_tolerance;
}

void model_controller::note_decision(instant now, double planned, warm_decision const& made) {
  double const memory_s = rates_.slow_memory().count();
  double const noise = 1.0 / std::sqrt(2.0 * std::max(planned, 1e-9) * memory_s);
  basis_ = {.rate_per_s = planned,
            .rate_tolerance = std::max(moved_rate, noise_deviations * noise),
            .service_s = services_.mean().count(),
            .arrivals = arrivals_,
            .services = services_.count(),
            .loads = loads_.count(),
            .period_changes = periods_.changes()};
  // Without a request the rate falls by e in its memory; a rate that was taken for rising, much sooner.
  bool const rises = planned > rates_.slow(now);
  double patience = rises ? rates_.fast_memory().count() : memory_s * basis_.rate_tolerance;
  if (made.log_odds != 0.0 || made.admit_share < 1.0) {  // which are to follow what is observed
    auto const follows = settings_.reject_on_miss ? admission_step() : settings_.goal.window;
    patience = std::min(patience, follows.count());
  }
  due_ = now + seconds{std::min(patience, one_day_s)};
  if (prewarm_) {
    due_ = std::min(due_, std::max(now, periods_.lapses().value_or(now)));
  }
  has_news_ = false;
}

seconds model_controller::admission_step() const noexcept {
  return settings_.goal.window / steps_in_window;
}

seconds model_controller::idle_timeout_since(instant idle_since, instant now,
                                             bool is_prewarmed) const noexcept {
  auto const next = prewarm_ ? periods_.next(std::max(idle_since, now)) : std::nullopt;
  if (!next) {
    return idle_timeout_;
  }
  if (auto const its = is_prewarmed ? periods_.next(idle_since) : std::nullopt;
      its && now < its->ends) {
    return std::max(prewarm_->hold, seconds{its->ends - idle_since});
  }
  bool const would_be_back_at_once = idle_since + prewarm_->hold >= next->begins - prewarm_->lead;
  return would_be_back_at_once ? std::max(prewarm_->hold, seconds{next->ends - idle_since})
                               : prewarm_->hold;
}

double model_controller::resident_share() const noexcept {
  return prewarm_ ? 0.0 : static_cast<double>(parts_) / settings_.resident_parts;
}

std::optional<instant> model_controller::prewarm_at(instant now) const noexcept {
  // A window that would be over by the time that it is loaded is none.
  auto const next = prewarm_ ? periods_.next(now + prewarm_->lead) : std::nullopt;
  return next ? std::optional{next->begins - prewarm_->lead} : std::nullopt;
}

double model_controller::absence_loss(instant now) const noexcept {
  return rates_.slow(now) * cold_start_cost_;
}

shared_model model_controller::demand(instant now) const {
  return {.arrivals_per_s = rates_.planned(now) * (is_foretold_ ? admitted_share_ : admit_share_),
          .service = services_.estimate()};
}

warm_inputs model_controller::inputs(instant now, shared_load const& beside) {
  warm_inputs in{.goal = settings_.goal,
                 .limits = settings_.limits,
                 .weight_bytes = settings_.weight_bytes,
                 .long_run_rate_per_s = rates_.slow(now),
                 .service = services_.estimate(),
                 .load = loads_.estimate(),
                 .handover = handover_,
                 .gaps = gaps_,
                 .current = decided_,
                 .copies = copies_.of_all(),
                 .resident_parts = settings_.resident_parts,
                 .current_parts = parts_,
                 .reject_on_miss = settings_.reject_on_miss && !is_foretold_,
                 .service_measured = services_.measured(),
                 .beside = beside,
                 .missed_share = missed_share(now),
                 .log_odds = calibration_.log_odds(),
                 .rate_memory = rates_.fast_memory(),
                 .periodic = periods_.found(now),
                 .prewarms = prewarm_.has_value()};
  if (in.log_odds != 0.0) {  // what is observed follows what is admitted slowly
    bool const may_change = now - admission_changed_ >= admission_step();
    in.least_admitted =
        may_change ? std::max(least_by_observation, fastest_fall * admit_share_) : admit_share_;
    in.most_admitted = may_change ? std::min(1.0, admit_share_ + fastest_rise) : admit_share_;
  }
  return in;
}

model_report model_controller::tick(instant now, shared_load const& beside) {
  learn_from_answers(now);
  auto in = inputs(now, beside);
  burst const around = burst_around(now, in.service, in.load);
  double const planned = rates_.planned(now);
  in.arrivals_per_s = std::max(planned, around.rate_per_s);
  if (in.periodic) {  // in the silence between two bunches the stream has not become slower
    in.long_run_rate_per_s = in.periodic->requests_per_s();
    in.arrivals_per_s = std::max(in.arrivals_per_s, *in.long_run_rate_per_s);
  }

  model_report report;
  report.warm = decide(in);
  if (report.warm.reason != explained_) {  // once for each reason, since it takes far longer
    in.explains = true;
    would_do_ = report.warm.feasible() ? std::nullopt : decide(in).would_do;
    explained_ = report.warm.reason;
  }
  report.warm.would_do = would_do_;
  prewarm_ = report.warm.prewarm;
  idle_timeout_ = report.warm.unaided_timeout;
  parts_ = report.warm.unaided_parts;
  cold_start_cost_ = cost_of_a_cold_start(report.warm, settings_.goal.latency);
  decided_ = idle_timeout_;
  if (report.warm.admit_share != admit_share_) {
    admission_changed_ = now;
  }
  admit_share_ = report.warm.admit_share;
  retry_after_ = report.warm.retry_after;
  required_share_ = report.warm.required_share;
  helps_others_ = services_.measured() && in.service.cdf(settings_.goal.latency) >= required_share_;
  double const attempts = attempts_.per_second(now);
  new_share_ = attempts > 0.0 ? std::min(1.0, rates_.fast(now) / attempts) : 1.0;
  predicted_ = report.warm.chosen.uncorrected;
  believed_ = calibration_.corrected(predicted_);
  note_decision(now, planned, report.warm);

  report.dispersion = around.dispersion;
  report.bursty = around.rate_per_s > planned;
  observe(now, report);
  return report;
}

void model_controller::observe(instant now, model_report& report) {
  auto const observed = attained_.read(now);
  report.observed_attainment = observed.share();
  report.observed_requests = observed.requests;
  if (is_foretold_) {
    report.warm.admit_share = admitted_share_ = admitted_.read(now).share().value_or(1.0);
  }
  report.half_width = calibration_.half_width();
  report.fast_rate_per_s = rates_.fast(now);
  report.slow_rate_per_s = rates_.slow(now);
  report.arrivals = arrivals_;
  report.refused = refused_;
  report.services = services_.count();
  report.loads = loads_.count();
  if (report.loads > 0) {
    report.handover_mean = handover_total_ / static_cast<double>(report.loads);
  }
}

}  // namespace sluice::scheduler
