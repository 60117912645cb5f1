#include "scheduler/attainment.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "scheduler/detail/gamma.hpp"

namespace sluice::scheduler {

namespace {

constexpr std::size_t steps = 128;

using excesses = std::vector<distribution::excess>;

excesses excesses_on_grid(distribution const& of, double h) {
  return of.excesses(seconds{h}, steps + 2);
}

/// Masses on 0, h, …, steps·h of a distribution whose stop-loss function E[(X − x)+] at j·h is `stop_loss(j)`; what
/// lies beyond is lost. Each bit of mass goes to the two grid points around it in proportion to
/// nearness, which keeps the mean.
template <typename StopLoss>
std::vector<double> on_grid(double h, StopLoss const& stop_loss) {
  std::vector<double> result(steps + 1);
  double before = 0.0;
  double here = stop_loss(0);
  for (std::size_t j = 0; j <= steps; ++j) {
    double const after = stop_loss(j + 1);
    double const mass = j == 0 ? 1.0 - (here - after) / h : (before - 2.0 * here + after) / h;
    result[j] = std::max(0.0, mass);
    before = here;
    here = after;
  }
  return result;
}

std::vector<double> on_grid(excesses const& of, double h) {
  return on_grid(h, [&of](std::size_t j) { return of[j].mean; });
}

std::vector<double> residual_on_grid(excesses const& of, double mean, double h) {
  if (mean <= 0.0) {
    std::vector<double> zero(steps + 1);
    zero[0] = 1.0;
    return zero;
  }
  return on_grid(h, [&](std::size_t j) { return of[j].square / (2.0 * mean); });
}

std::vector<double> sum_of(std::vector<double> const& a, std::vector<double> const& b) {
  std::vector<double> result(steps + 1);
  for (std::size_t i = 0; i <= steps; ++i) {
    if (double const weight = a[i]; weight > 0.0) {
      double* const to = result.data() + i;
      double const* const from = b.data();
      for (std::size_t j = 0; j <= steps - i; ++j) {
        to[j] += weight * from[j];
      }
    }
  }
  return result;
}

double dot(std::vector<double> const& a, std::vector<double> const& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i <= steps; ++i) {
    sum += a[i] * b[i];
  }
  return std::min(1.0, sum);
}

}  // namespace

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
  double const h = limit / static_cast<double>(steps);
  bool const is_simulated = beside_.by == predicted_by::simulation;
  auto const own = excesses_on_grid(service, h);
  auto const loading = excesses_on_grid(load, h);
  residual_ = residual_on_grid(own, service_mean_s_, h);
  if (beside_.by != predicted_by::alone) {
    residual_of_all_ =
        residual_on_grid(excesses_on_grid(beside_.service, h), beside_.service.mean().count(), h);
  }
  if (is_simulated) {
    simulated_waits_ = on_grid(excesses_on_grid(beside_.waits, h), h);
  }
  behind_load_ = sum_of(residual_on_grid(loading, load_mean_s_, h), on_grid(own, h));
  loading_ = on_grid(loading, h);
  auto const computing =
      is_simulated ? excesses_on_grid(service.scaled(beside_.alone_factor), h) : own;
  within_.resize(steps + 1);
  for (std::size_t j = 0; j <= steps; ++j) {
    within_[j] = std::clamp(1.0 - computing[steps - j].probability, 0.0, 1.0);
  }
}

double attainment_model::utilisation(double arrivals_per_s) const noexcept {
  double const own = arrivals_per_s * service_mean_s_;
  if (beside_.by == predicted_by::alone) {
    return own;
  }
  double const others = beside_.arrivals_per_s * beside_.service.mean().count() -
                        beside_.own_per_s * service_mean_s_ / beside_.speed;
  return own + std::max(0.0, others);
}

// The always warm wait is a geometric number (ratio ρ) of residual services: w = (1 − ρ) Σ ρⁿ r*ⁿ,
// by recursion. ρr is the sum of that of all models, each with its own.
attainment_model::masses attainment_model::waits(double arrivals_per_s) const {
  masses rest(steps + 1);  // ρr
  double const others = utilisation(arrivals_per_s) - arrivals_per_s * service_mean_s_;
  double const all = beside_.arrivals_per_s * beside_.service.mean().count();
  for (std::size_t j = 0; j <= steps; ++j) {
    double const own = arrivals_per_s * service_mean_s_ * residual_[j];
    double const of_others = others > 0.0
                                 ? all * residual_of_all_[j] - beside_.own_per_s * service_mean_s_ /
                                                                   beside_.speed * residual_[j]
                                 : 0.0;
    rest[j] = std::max(0.0, own + of_others);
  }
  masses w(steps + 1);
  double const scale = 1.0 / (1.0 - rest[0]);
  w[0] = (1.0 - utilisation(arrivals_per_s)) * scale;
  for (std::size_t n = 0; n <= steps; ++n) {
    if (n > 0) {
      w[n] *= scale;  // all that is less has been added
    }
    double* const to = w.data() + n;
    double const* const from = rest.data();
    double const weight = w[n];
    for (std::size_t j = 1; j <= steps - n; ++j) {
      to[j] += from[j] * weight;
    }
  }
  return w;
}

double attainment_model::mean_response_s(double arrivals_per_s) const noexcept {
  if (beside_.by == predicted_by::simulation) {
    return beside_.waits.mean().count() + service_mean_s_ * beside_.alone_factor;
  }
  double const squares = beside_.arrivals_per_s * beside_.service.second_moment_s2() +
                         (arrivals_per_s - beside_.own_per_s) * service_square_s2_;
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
  result.cold = dot(loading_, within_);
  if (result.utilisation < 1.0) {
    auto const w = is_simulated ? simulated_waits_ : waits(arrivals_per_s);
    result.warm = dot(w, within_);
    result.delayed = dot(sum_of(behind_load_, w), within_);
    result.idle_share = 1.0 - result.utilisation;
    if (!is_alone) {  // others keep waiting those who find their own model idle or gone
      result.idle = result.warm;
      result.cold = dot(sum_of(loading_, w), within_);
      result.idle_share = 1.0 / (1.0 + arrivals_per_s * mean_response_s(arrivals_per_s));
    }
  }
  return result;
}

double attainment_model::largest_warm_rate(double share, double limit_per_s) const {
  auto const meets = [&](double rate) {
    return utilisation(rate) < 1.0 && dot(waits(rate), within_) >= share;
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
