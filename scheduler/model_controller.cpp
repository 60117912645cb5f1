#include "scheduler/model_controller.hpp"

#include <algorithm>
#include <cmath>

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
constexpr double least_variance = 0.01;
// Where a prediction is corrected, the share of requests that is admitted changes so often in a window and by so much at once.
constexpr double steps_in_window = 20.0;
constexpr double fastest_fall = 0.8;
constexpr double fastest_rise = 0.05;
constexpr double least_by_observation = 0.25;

bool many_more(std::uint64_t now, std::uint64_t before) {
  return now - before >= std::clamp<std::uint64_t>(before / 2, 1, most_uncounted);
}

}  // namespace

model_controller::model_controller(model_settings const& settings, instant start)
    : settings_(settings),
      rates_(start),
      dispersions_{dispersion_index{seconds{1.0}, start}, dispersion_index{seconds{10.0}, start},
                   dispersion_index{seconds{60.0}, start}},
      services_(settings.service),
      loads_(settings.load),
      attained_(settings.goal.window, start),
      idle_timeout_(settings.limits.max_idle),
      calibration_(settings.goal.window),
      learned_(start),
      admission_changed_(start) {
  settings.goal.check();
  settings.limits.check();
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
  ++arrivals_;
  has_news_ = has_news_ || many_more(arrivals_, basis_.arrivals) || rate_has_moved(now);
}

void model_controller::on_refused_elsewhere(instant now) {
  note_arrival(now);
  attained_.add(now, false);
}

model_controller::admission model_controller::on_arrival(instant now) {
  note_arrival(now);
  admit_credit_ += admit_share_;
  if (admit_credit_ >= 1.0) {
    admit_credit_ -= 1.0;
    return {};
  }
  ++refused_;
  attained_.add(now, false);
  return {.admitted = false, .retry_after = retry_after_};
}

void model_controller::on_service(instant now, seconds service, seconds response) {
  on_late_service(service);
  bool const within = response <= settings_.goal.latency;
  attained_.add(now, within);
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

void model_controller::on_failure(instant now) {
  attained_.add(now, false);
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
  calibration_.add(now - learned_, answers_, answers_within_, predicted_);
  learned_ = std::max(learned_, now);
  answers_ = answers_within_ = 0;
}

void model_controller::on_load(instant /*now*/, seconds load, seconds handover) {
  loads_.add(load);
  has_news_ = has_news_ || many_more(loads_.count(), basis_.loads);
  handover_total_ += std::clamp(handover, seconds{0.0}, load);
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
            .loads = loads_.count()};
  // Without a request the rate falls by e in its memory; a rate that was taken for rising, much sooner.
  bool const rises = planned > rates_.slow(now);
  double patience = rises ? rates_.fast_memory().count() : memory_s * basis_.rate_tolerance;
  if (made.log_odds != 0.0 || made.admit_share < 1.0) {  // which are to follow what is observed
    auto const follows = settings_.reject_on_miss ? admission_step() : settings_.goal.window;
    patience = std::min(patience, follows.count());
  }
  due_ = now + seconds{std::min(patience, one_day_s)};
  has_news_ = false;
}

seconds model_controller::admission_step() const noexcept {
  return settings_.goal.window / steps_in_window;
}

shared_model model_controller::demand(instant now) const {
  return {.arrivals_per_s = rates_.planned(now) * admit_share_, .service = services_.estimate()};
}

warm_inputs model_controller::inputs(instant now, shared_load const& beside) {
  warm_inputs in{.goal = settings_.goal,
                 .limits = settings_.limits,
                 .weight_bytes = settings_.weight_bytes,
                 .long_run_rate_per_s = rates_.slow(now),
                 .service = services_.estimate(),
                 .load = loads_.estimate(),
                 .gaps = gaps_,
                 .current = decided_,
                 .reject_on_miss = settings_.reject_on_miss,
                 .service_measured = services_.measured(),
                 .beside = beside,
                 .log_odds = calibration_.log_odds(),
                 .rate_memory = rates_.fast_memory()};
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

  model_report report;
  report.warm = decide(in);
  if (report.warm.reason != explained_) {  // once for each reason, since it takes far longer
    in.explains = true;
    would_do_ = report.warm.feasible() ? std::nullopt : decide(in).would_do;
    explained_ = report.warm.reason;
  }
  report.warm.would_do = would_do_;
  idle_timeout_ = report.warm.chosen.idle_timeout;
  decided_ = idle_timeout_;
  if (report.warm.admit_share != admit_share_) {
    admission_changed_ = now;
  }
  admit_share_ = report.warm.admit_share;
  retry_after_ = report.warm.retry_after;
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
