#include "scheduler/attainment.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "scheduler/detail/gamma.hpp"
#include "scheduler/detail/time_grid.hpp"

namespace sluice::scheduler {

using detail::excesses_on_grid;
using detail::grid_steps;
using detail::on_grid;
using detail::residual_on_grid;
using detail::share_of;
using detail::sum_of;

std::string_view to_string(predicted_by how) noexcept {
  switch (how) {
    case predicted_by::alone:
      return "alone";
    case predicted_by::classes_in_turn:
      return "classes_in_turn";
    case predicted_by::simulation:
      return "simulation";
  }
  return "unknown";
}

double attainment_at_rate::share_within(double exceed) const noexcept {
  if (utilisation >= 1.0) {
    return 0.0;
  }
  double const p = std::clamp(exceed, 0.0, 1.0);
  double const loading = arrivals_per_s * p * load_mean_s;
  return (warm + p * idle_share * (cold - idle) + loading * delayed) / (1.0 + loading);
}

attainment_model::attainment_model(distribution const& service, distribution const& load,
                                   seconds latency, shared_load const& beside)
    : beside_(beside),
      service_mean_s_(service.mean().count()),
      service_square_s2_(service.second_moment_s2()),
      load_mean_s_(load.mean().count()) {
  double const limit = latency.count();
  if (!(limit > 0.0) || !std::isfinite(limit)) {
    throw std::invalid_argument("the latency must be a finite number of seconds > 0; got " +
                                std::to_string(limit));
  }
  if (beside_.by != predicted_by::alone && !beside_.service) {
    throw std::invalid_argument("what others ask of a device needs their service");
  }
  double const h = limit / static_cast<double>(grid_steps);
  step_s_ = h;
  bool const is_simulated = beside_.by == predicted_by::simulation;
  auto const own = excesses_on_grid(service, h);
  auto const loading = excesses_on_grid(load, h);
  residual_ = residual_on_grid(own, service_mean_s_, h);
  if (beside_.by != predicted_by::alone) {
    residual_of_all_ =
        residual_on_grid(excesses_on_grid(*beside_.service, h), beside_.service->mean().count(), h);
  }
  if (is_simulated) {
    simulated_waits_ = on_grid(excesses_on_grid(beside_.waits, h), h);
  }
  behind_load_ = sum_of(residual_on_grid(loading, load_mean_s_, h), on_grid(own, h));
  loading_ = on_grid(loading, h);
  auto const computing =
      is_simulated ? excesses_on_grid(service.scaled(beside_.alone_factor), h) : own;
  within_.resize(grid_steps + 1);
  for (std::size_t j = 0; j <= grid_steps; ++j) {
    within_[j] = std::clamp(1.0 - computing[grid_steps - j].probability, 0.0, 1.0);
  }
}

double attainment_model::utilisation(double arrivals_per_s) const noexcept {
  double const own = arrivals_per_s * service_mean_s_;
  if (beside_.by == predicted_by::alone) {
    return own;
  }
  double const others = beside_.arrivals_per_s * beside_.service->mean().count() -
                        beside_.own_per_s * service_mean_s_ / beside_.speed;
  return own + std::max(0.0, others);
}

// ρr is the sum of that of all models, each with its own.
attainment_model::masses attainment_model::waits(double arrivals_per_s) const {
  masses rest(grid_steps + 1);  // ρr
  double const others = utilisation(arrivals_per_s) - arrivals_per_s * service_mean_s_;
  double const all = others > 0.0 ? beside_.arrivals_per_s * beside_.service->mean().count() : 0.0;
  for (std::size_t j = 0; j <= grid_steps; ++j) {
    double const own = arrivals_per_s * service_mean_s_ * residual_[j];
    double const of_others = others > 0.0
                                 ? all * residual_of_all_[j] - beside_.own_per_s * service_mean_s_ /
                                                                   beside_.speed * residual_[j]
                                 : 0.0;
    rest[j] = std::max(0.0, own + of_others);
  }
  return detail::waits_on_grid(rest, utilisation(arrivals_per_s));
}

double attainment_model::mean_response_s(double arrivals_per_s) const noexcept {
  if (beside_.by == predicted_by::simulation) {
    return beside_.waits.mean().count() + service_mean_s_ * beside_.alone_factor;
  }
  double const of_all =
      beside_.service ? beside_.arrivals_per_s * beside_.service->second_moment_s2() : 0.0;
  double const squares = of_all + (arrivals_per_s - beside_.own_per_s) * service_square_s2_;
  return service_mean_s_ + 0.5 * std::max(0.0, squares) / (1.0 - utilisation(arrivals_per_s));
}

attainment_at_rate attainment_model::at(double arrivals_per_s) const {
  if (!(arrivals_per_s >= 0.0) || !std::isfinite(arrivals_per_s)) {
    throw std::invalid_argument("arrivals_per_s must be a finite number >= 0; got " +
                                std::to_string(arrivals_per_s));
  }
  bool const is_alone = beside_.by == predicted_by::alone;
  bool const is_simulated = beside_.by == predicted_by::simulation;
  attainment_at_rate result;
  result.arrivals_per_s = arrivals_per_s;
  result.utilisation = is_simulated ? beside_.utilisation : utilisation(arrivals_per_s);
  result.load_mean_s = load_mean_s_;
  result.idle = within_[0];
  result.cold = share_of(loading_, within_);
  if (result.utilisation < 1.0) {
    auto const w = is_simulated ? simulated_waits_ : waits(arrivals_per_s);
    result.warm = share_of(w, within_);
    result.delayed = share_of(sum_of(behind_load_, w), within_);
    result.idle_share = 1.0 - result.utilisation;
    if (!is_alone) {  // others keep waiting those who find their own model idle or gone
      result.idle = result.warm;
      result.cold = share_of(sum_of(loading_, w), within_);
      result.idle_share = 1.0 / (1.0 + arrivals_per_s * mean_response_s(arrivals_per_s));
    }
  }
  return result;
}

double attainment_model::cold_after(distribution const& load) const {
  return share_of(on_grid(excesses_on_grid(load, step_s_), step_s_), within_);
}

double attainment_model::largest_warm_rate(double share, double limit_per_s) const {
  auto const meets = [&](double rate) {
    return utilisation(rate) < 1.0 && share_of(waits(rate), within_) >= share;
  };
  if (!meets(0.0)) {
    return 0.0;
  }
  if (meets(limit_per_s)) {
    return limit_per_s;
  }
  double low = 0.0;
  double high = limit_per_s;
  for (int i = 0; i < 30; ++i) {
    double const middle = 0.5 * (low + high);
    (meets(middle) ? low : high) = middle;
  }
  return low;
}

void objective::check() const {
  auto const share = [](char const* name, double value) {
    if (!(value > 0.0 && value <= 1.0)) {
      throw std::invalid_argument(std::string(name) +
                                  " is a share and must be in (0, 1], such as 0.99; got " +
                                  std::to_string(value));
    }
  };
  auto const time = [](char const* name, seconds value) {
    if (!(value.count() > 0.0) || !std::isfinite(value.count())) {
      throw std::invalid_argument(std::string(name) +
                                  " must be a finite number of seconds > 0; got " +
                                  std::to_string(value.count()));
    }
  };
  share("percentile", percentile);
  share("attainment", attainment);
  time("latency", latency);
  time("window", window);
}

namespace {

/// The largest μ up to `limit` with Q(shape, μ) ≥ confidence, by Newton's method within bounds that close in.
double largest_mean(double shape, double confidence, double limit) {
  constexpr double precision = 1e-12;
  if (detail::gamma_survival(shape, limit) >= confidence) {
    return limit;
  }
  double low = 0.0;
  double high = limit;
  double at = std::min(shape, 0.5 * limit);
  for (int i = 0; i < 100 && high - low > precision * high; ++i) {
    double const over = detail::gamma_survival(shape, at) - confidence;
    (over >= 0.0 ? low : high) = at;
    double const slope = detail::gamma_step(shape, at) * shape / at;
    double const next = slope > 0.0 ? at + over / slope : 0.0;
    if (std::abs(next - at) <= precision * at) {
      break;
    }
    at = next > low && next < high ? next : 0.5 * (low + high);
  }
  return at;
}

}  // namespace

double required_share(objective const& goal, double arrivals_per_s) {
  goal.check();
  double const requests = std::clamp(arrivals_per_s * goal.window.count(), 1.0, 1e5);
  double const allowed = (1.0 - goal.percentile) * requests;
  double const confidence = std::min(goal.attainment, 0.999);
  double const low = largest_mean(allowed + 1.0, confidence, requests);
  // A share `attainment` of windows, each with a share `percentile` of its requests, is at least
  // their product.
  return std::max(1.0 - low / requests, goal.percentile * confidence);
}

}  // namespace sluice::scheduler
