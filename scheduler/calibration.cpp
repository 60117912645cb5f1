#include "scheduler/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

constexpr double least_share = 0.02;
constexpr double most_share = 0.98;
constexpr double batches_in_window = 10.0;
constexpr double enough_requests = 30.0;
// Outside of the interval: corrected; within half of it again: no longer.
constexpr double interval_deviations = 2.0;
constexpr double calm_deviations = 1.0;
// As if so much had been seen already that says 0.
constexpr double prior_information = 2.0;
constexpr double largest_step = 1.0;
constexpr double largest_correction = 8.0;
constexpr double longest_pause = 100.0;  // windows, after which nothing is left

double log_odds_of(double share) noexcept {
  return std::log(share / (1.0 - share));
}
double share_of(double log_odds) noexcept {
  return 1.0 / (1.0 + std::exp(-log_odds));
}

}  // namespace

double corrected_share(double share, double log_odds) noexcept {
  if (log_odds == 0.0) {
    return share;
  }
  double const inside = std::clamp(share, least_share, most_share);
  return std::clamp(share_of(log_odds_of(inside) + log_odds) + (share - inside), 0.0, 1.0);
}

double uncorrected_share(double wanted, double log_odds) noexcept {
  if (corrected_share(1.0, log_odds) < wanted) {
    return 2.0;
  }
  double low = 0.0;
  double high = 1.0;
  for (int i = 0; i < 50; ++i) {
    double const middle = 0.5 * (low + high);
    (corrected_share(middle, log_odds) >= wanted ? high : low) = middle;
  }
  return high;
}

calibration::calibration(seconds window) : window_s_(window.count()) {
  if (!(window_s_ > 0.0) || !std::isfinite(window_s_)) {
    throw std::invalid_argument("the window must be a finite number of seconds > 0; got " +
                                std::to_string(window_s_));
  }
}

void calibration::add(seconds passed, std::uint64_t requests, std::uint64_t within,
                      double predicted) noexcept {
  double const time_s =
      passed.count() > 0.0 ? std::min(passed.count(), longest_pause * window_s_) : 0.0;
  double const keep = std::exp(-time_s / window_s_);
  for (auto* const sum : {&state_.requests, &state_.over, &state_.information}) {
    *sum *= keep;
  }
  state_.chance *= keep * keep;
  state_.clusters *= keep * keep;
  state_.batch_s += time_s;
  auto const n = static_cast<double>(requests);
  auto const in_time = static_cast<double>(std::min(within, requests));
  double const share = std::clamp(predicted, 0.0, 1.0);
  state_.requests += n;
  state_.over += in_time - n * share;
  state_.batch_over += in_time - n * share;
  double const inside = std::clamp(share, least_share, most_share);
  state_.chance += n * inside * (1.0 - inside);
  if (state_.batch_s >= window_s_ / batches_in_window) {
    close_batch();
  }
  if (requests > 0) {  // a step of Newton's towards what makes the sum of errors zero
    double const now = corrected_share(share, state_.fitted);
    double const spread = std::clamp(now, least_share, most_share);
    state_.information += n * spread * (1.0 - spread);
    double const step = (in_time - n * now) / (state_.information + prior_information);
    state_.fitted = std::clamp(state_.fitted + std::clamp(step, -largest_step, largest_step),
                               -largest_correction, largest_correction);
  }
  double const limit = (state_.is_correcting ? calm_deviations : interval_deviations) * deviation();
  state_.is_correcting = state_.requests >= enough_requests && std::abs(state_.over) > limit;
}

void calibration::recall(kept_state const& from, seconds age) {
  constexpr double most = 1e15;
  for (double const each : {from.requests, from.chance, from.clusters, from.batch_s,
                            from.information, std::abs(from.over), std::abs(from.batch_over)}) {
    if (!(each >= 0.0) || !(each <= most)) {
      throw std::invalid_argument("what predictions came to must be numbers up to " +
                                  std::to_string(most) + "; got " + std::to_string(each));
    }
  }
  if (!(std::abs(from.fitted) <= largest_correction)) {
    throw std::invalid_argument("a correction is at most " + std::to_string(largest_correction) +
                                "; got " + std::to_string(from.fitted));
  }
  state_ = from;
  add(age, 0, 0, 0.0);
}

void calibration::close_batch() noexcept {
  state_.clusters += state_.batch_over * state_.batch_over;
  state_.batch_over = 0.0;
  state_.batch_s = 0.0;
}

double calibration::deviation() const noexcept {
  return std::sqrt(
      std::max(state_.chance, state_.clusters + state_.batch_over * state_.batch_over));
}

double calibration::half_width() const noexcept {
  return state_.requests >= enough_requests
             ? std::min(1.0, interval_deviations * deviation() / state_.requests)
             : 1.0;
}

}  // namespace sluice::scheduler
