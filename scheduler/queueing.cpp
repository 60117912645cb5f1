#include "scheduler/queueing.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {

namespace {

void check(queue_load const& demand) {
  if (!(demand.arrivals_per_s >= 0.0) || !std::isfinite(demand.arrivals_per_s)) {
    throw std::invalid_argument("arrivals_per_s must be a finite number >= 0; got " +
                                std::to_string(demand.arrivals_per_s));
  }
}

void check(queue_load const& demand, double exceed) {
  check(demand);
  if (!(exceed >= 0.0 && exceed <= 1.0)) {
    throw std::invalid_argument(
        "the probability that an idle gap exceeds the timeout must be in 0..1; got " +
        std::to_string(exceed));
  }
}

void check_time(char const* what, seconds value) {
  if (!(value.count() >= 0.0) || !std::isfinite(value.count())) {
    throw std::invalid_argument(std::string(what) +
                                " must be a finite number of seconds >= 0; got " +
                                std::to_string(value.count()));
  }
}

}  // namespace

double poisson_exceed(double arrivals_per_s, seconds idle_timeout) noexcept {
  if (idle_timeout == forever) {
    return 0.0;  // also at rate 0, where the product below would be NaN
  }
  return std::exp(-arrivals_per_s * std::max(0.0, idle_timeout.count()));
}

seconds mean_warm_wait(queue_load const& demand) {
  check(demand);
  double const rho = demand.utilisation();
  if (rho >= 1.0) {
    return forever;  // the formula would turn negative
  }
  return seconds{demand.arrivals_per_s * demand.service.second_moment_s2() / (2.0 * (1.0 - rho))};
}

seconds mean_wait(queue_load const& demand, double exceed) {
  check(demand, exceed);
  if (demand.utilisation() >= 1.0) {
    return forever;
  }
  double const rate = demand.arrivals_per_s;
  double const s1 = demand.load.mean().count();
  double const s2 = demand.load.second_moment_s2();
  double const extra = exceed * (2.0 * s1 + rate * s2) / (2.0 * (1.0 + rate * exceed * s1));
  return mean_warm_wait(demand) + seconds{extra};
}

cycle cycle_of(queue_load const& demand, double exceed) {
  check(demand, exceed);
  double const rate = demand.arrivals_per_s;
  double const rho = demand.utilisation();
  if (rho >= 1.0) {
    return {.length = forever};
  }
  double const s1 = demand.load.mean().count();
  double const released = exceed * (1.0 - rho) / (1.0 + rate * exceed * s1);
  return {.length = rate > 0.0 ? seconds{(1.0 / rate + exceed * s1) / (1.0 - rho)} : forever,
          .released_fraction = released,
          .loads_per_s = rate * released,
          .cold_or_loading = released * (1.0 + rate * s1)};
}

teardown_effect with_teardown(queue_load const& demand, double exceed, seconds teardown) {
  check(demand, exceed);
  check_time("the teardown", teardown);
  double const rate = demand.arrivals_per_s;
  double const rho = demand.utilisation();
  if (rho >= 1.0) {
    return {.mean_wait = forever};
  }
  double const u = teardown.count();
  double const s1 = demand.load.mean().count();
  double const s2 = demand.load.second_moment_s2();
  if (rate == 0.0) {
    return {.mean_wait = demand.load.mean() * exceed, .held_fraction = 1.0 - exceed};
  }
  double const nobody_came = std::exp(-rate * u);
  double const length =
      1.0 / rate + exceed * (u + nobody_came / rate - 1.0 / rate + s1);  // without service
  double const present = exceed * (0.5 * rate * u * u + nobody_came * s1 + rate * u * s1 +
                                   0.5 * rate * s2);  // their number, integrated over it
  return {.mean_wait = mean_warm_wait(demand) + seconds{present / (rate * length)},
          .held_fraction = 1.0 - exceed * nobody_came * (1.0 - rho) / (rate * length)};
}

seconds mean_wait_of_gathering(queue_load const& demand, unsigned requests) {
  check(demand);
  if (requests == 0) {
    throw std::invalid_argument("at least one request must wait before a load begins; got 0");
  }
  seconds const warm = mean_warm_wait(demand);
  double const rate = demand.arrivals_per_s;
  if (warm == forever || (rate == 0.0 && requests > 1)) {
    return forever;
  }
  double const n = requests;
  double const s1 = demand.load.mean().count();
  double const gathering = requests > 1 ? 0.5 * n * (n - 1.0) / rate : 0.0;
  return warm + seconds{(gathering + n * s1 + 0.5 * rate * demand.load.second_moment_s2()) /
                        (n + rate * s1)};
}

seconds mean_wait_behind(queue_load const& demand, distribution const& elsewhere) {
  seconds const warm = mean_warm_wait(demand);
  double const mean = elsewhere.mean().count();
  return mean > 0.0 ? warm + seconds{0.5 * elsewhere.second_moment_s2() / mean} : warm;
}

double exceed_for_extra_wait(queue_load const& demand, seconds extra) {
  check(demand);
  check_time("the extra wait", extra);
  double const rate = demand.arrivals_per_s;
  double const s1 = demand.load.mean().count();
  double const s2 = demand.load.second_moment_s2();
  double const x = extra.count();
  double const per_exceed = 2.0 * s1 + rate * s2 - 2.0 * x * rate * s1;
  return per_exceed > 2.0 * x ? 2.0 * x / per_exceed : 1.0;
}

seconds poisson_timeout(double arrivals_per_s, double exceed) noexcept {
  if (exceed >= 1.0) {
    return seconds{0.0};
  }
  return exceed > 0.0 && arrivals_per_s > 0.0 ? seconds{-std::log(exceed) / arrivals_per_s}
                                              : forever;
}

double wait_tail::probability_above(seconds t) const noexcept {
  if (prefactor <= 0.0) {
    return 0.0;  // nobody waits: the decay may be infinite
  }
  return std::min(utilisation, prefactor * std::exp(-decay_per_s * std::max(0.0, t.count())));
}

seconds wait_tail::quantile(double q) const noexcept {
  double const above = 1.0 - q;
  if (above >= utilisation || prefactor <= above) {
    return seconds{0.0};
  }
  return decay_per_s > 0.0 ? seconds{std::log(prefactor / above) / decay_per_s} : forever;
}

wait_tail lundberg_tail(queue_load const& demand) {
  check(demand);
  double const rate = demand.arrivals_per_s;
  double const rho = demand.utilisation();
  if (rho >= 1.0) {
    return {.utilisation = 1.0, .prefactor = 1.0, .decay_per_s = 0.0};
  }
  if (rho == 0.0) {
    return {.utilisation = 0.0, .prefactor = 0.0, .decay_per_s = forever.count()};
  }
  // λ(E[e^{θB}] − 1) = θ in the form h(θ) = ln E[e^{θB}] − ln(1 + θ/λ) = 0. h is convex (a cumulant
  // function minus a concave one), 0 at 0 with a negative slope, and positive in the end: one
  // positive root.
  auto const h = [&](double theta) {
    return std::log(demand.service.mgf(theta)) - std::log1p(theta / rate);
  };
  double const limit = demand.service.mgf_limit_per_s();
  double low = 0.0;
  double high = 2.0 * (1.0 - rho) / (rate * demand.service.second_moment_s2());  // heavy traffic
  while (high < limit && h(high) < 0.0) {
    low = high;
    high *= 2.0;
  }
  high = std::min(high, limit);
  while (!std::isfinite(h(high)) && high - low > 1e-15 * high) {
    double const middle = 0.5 * (low + high);
    (h(middle) < 0.0 ? low : high) = middle;
  }
  // From the right of the root Newton's method on a convex function falls monotonously onto it.
  double theta = std::isfinite(h(high)) ? high : low;
  for (int i = 0; i < 100; ++i) {
    double const slope =
        demand.service.mgf_slope(theta) / demand.service.mgf(theta) - 1.0 / (rate + theta);
    double const step = h(theta) / slope;
    theta -= step;
    if (!(std::abs(step) > 1e-13 * theta)) {
      break;
    }
  }
  return {.utilisation = rho,
          .prefactor = (1.0 - rho) / (rate * demand.service.mgf_slope(theta) - 1.0),
          .decay_per_s = theta};
}

}  // namespace sluice::scheduler
