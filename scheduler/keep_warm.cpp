#include "scheduler/keep_warm.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

void check(keep_warm_costs const& costs) {
  for (double const each : {costs.per_held_s, costs.per_load}) {
    if (!(each >= 0.0) || !std::isfinite(each)) {
      throw std::invalid_argument("costs must be finite numbers >= 0; got " + std::to_string(each));
    }
  }
}

/// The least between two points that have it between them, by golden sections.
keep_warm_choice least_between(distribution const& gaps, keep_warm_costs const& costs, double low,
                               double high) {
  constexpr double golden = 0.6180339887498949;
  auto const cost = [&](double t) { return keep_warm_cost(gaps, costs, seconds{t}); };
  double left = high - golden * (high - low);
  double right = low + golden * (high - low);
  double at_left = cost(left);
  double at_right = cost(right);
  while (high - low > 1e-6 * high) {
    if (at_left <= at_right) {
      high = right;
      right = left;
      at_right = at_left;
      at_left = cost(left = high - golden * (high - low));
    } else {
      low = left;
      left = right;
      at_left = at_right;
      at_right = cost(right = low + golden * (high - low));
    }
  }
  double const middle = 0.5 * (low + high);
  return {seconds{middle}, cost(middle)};
}

}  // namespace

double keep_warm_cost(distribution const& gaps, keep_warm_costs const& costs,
                      seconds idle_timeout) {
  check(costs);
  if (idle_timeout == forever) {
    return costs.per_held_s * gaps.mean().count();
  }
  if (!(idle_timeout.count() >= 0.0)) {
    throw std::invalid_argument("the idle timeout must be >= 0 s; got " +
                                std::to_string(idle_timeout.count()));
  }
  double const held = (gaps.mean() - gaps.mean_excess(idle_timeout)).count();
  return costs.per_held_s * held + costs.per_load * (1.0 - gaps.cdf(idle_timeout));
}

keep_warm_choice cheapest_timeout(distribution const& gaps, keep_warm_costs const& costs) {
  keep_warm_choice best{seconds{0.0}, keep_warm_cost(gaps, costs, seconds{0.0})};
  auto const take = [&best](keep_warm_choice const& other) {
    // What is as good but for rounding does not count as better.
    best = other.cost_per_gap < best.cost_per_gap * (1.0 - 1e-12) ? other : best;
  };
  take({forever, keep_warm_cost(gaps, costs, forever)});
  double const mean = gaps.mean().count();
  if (mean <= 0.0) {
    return best;
  }
  constexpr double ratio = 1.2;
  for (double t = 1e-4 * mean; t < 1e4 * mean; t *= ratio) {
    double const here = keep_warm_cost(gaps, costs, seconds{t});
    if (here <= keep_warm_cost(gaps, costs, seconds{t / ratio}) &&
        here <= keep_warm_cost(gaps, costs, seconds{t * ratio})) {
      take(least_between(gaps, costs, t / ratio, t * ratio));
    }
  }
  return best;
}

seconds competitive_timeout(keep_warm_costs const& costs) {
  check(costs);
  return costs.per_held_s > 0.0 ? seconds{costs.per_load / costs.per_held_s} : forever;
}

}  // namespace sluice::scheduler
