#include "scheduler/partial_warmth.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

constexpr std::size_t most_stages = 3;
using stages =
    std::array<double, most_stages>;  ///< rates; `at_once` for a stage that takes no time
constexpr double at_once = std::numeric_limits<double>::infinity();

void check(partial_warmth const& chain, seconds latency) {
  auto const need = [](bool good, char const* what, double got) {
    if (!good) {
      throw std::invalid_argument(std::string(what) + "; got " + std::to_string(got));
    }
  };
  auto const time = [&](char const* what, seconds value) {
    need(value.count() >= 0.0 && std::isfinite(value.count()), what, value.count());
  };
  need(chain.arrivals_per_s >= 0.0 && std::isfinite(chain.arrivals_per_s),
       "arrivals_per_s must be a finite number >= 0", chain.arrivals_per_s);
  time("the service time must be a finite number of seconds > 0", chain.service);
  need(chain.service.count() > 0.0, "the service time must be > 0 s", chain.service.count());
  time("the load time must be a finite number of seconds >= 0", chain.load);
  time("the latency must be a finite number of seconds >= 0", latency);
  need(chain.idle_timeout.count() >= 0.0, "the idle timeout must be >= 0 s",
       chain.idle_timeout.count());
  need(chain.cold_share >= 0.0 && chain.cold_share <= 1.0, "cold_share must be in 0..1",
       chain.cold_share);
}

/// Transitions of a walk through the stages, one row for each and one for its end.
struct walk {
  std::array<std::array<double, most_stages + 1>, most_stages + 1> to{};

  [[nodiscard]] walk operator*(walk const& after) const {
    walk result;
    for (std::size_t i = 0; i <= most_stages; ++i) {
      for (std::size_t k = i; k <= most_stages; ++k) {
        for (std::size_t j = k; j <= most_stages; ++j) {
          result.to[i][j] += to[i][k] * after.to[k][j];
        }
      }
    }
    return result;
  }
};

/// P(sum of the stages ≤ t): jumps at the rate of the fastest for a short time, which is then doubled. Nothing is ever
/// subtracted, so that stages of nearly the same rate do no harm.
double share_through(stages rates, double t) {
  constexpr double too_short_to_count = 1e8;
  auto const counts = [t](double rate) { return rate * t < too_short_to_count; };
  double const fastest =
      std::accumulate(rates.begin(), rates.end(), 0.0,
                      [&](double most, double r) { return counts(r) ? std::max(most, r) : most; });
  if (fastest == 0.0 || t == 0.0) {
    return std::none_of(rates.begin(), rates.end(), counts) ? 1.0 : 0.0;
  }
  int const doublings = std::max(0, static_cast<int>(std::ceil(std::log2(fastest * t))));
  double const jumps = fastest * t / std::exp2(doublings);
  walk step;
  walk sum;
  for (std::size_t i = 0; i <= most_stages; ++i) {
    double const leave = i == most_stages ? 0.0 : counts(rates[i]) ? rates[i] / fastest : 1.0;
    step.to[i][i] = 1.0 - leave;
    if (i < most_stages) {
      step.to[i][i + 1] = leave;
    }
    sum.to[i][i] = 1.0;
  }
  constexpr int terms = 24;  // of a Poisson distribution of mean at most one
  for (int n = terms; n > 0; --n) {
    walk next = step * sum;
    for (std::size_t i = 0; i <= most_stages; ++i) {
      for (std::size_t j = i; j <= most_stages; ++j) {
        next.to[i][j] *= jumps / n;
      }
      next.to[i][i] += 1.0;
    }
    sum = next;
  }
  double const none = std::exp(-jumps);
  for (auto& row : sum.to) {
    for (auto& each : row) {
      each *= none;
    }
  }
  for (int i = 0; i < doublings; ++i) {
    sum = sum * sum;
  }
  std::size_t first = 0;
  while (first < most_stages && !counts(rates[first])) {
    ++first;  // what takes no time comes first, where it can be left out
  }
  return std::min(1.0, sum.to[first][most_stages]);
}

/// Arrivals of one kind, by what they find: how many, and what their responses are sums of.
struct found {
  double mass;
  stages rates;
};

}  // namespace

partial_warmth_result solve(partial_warmth const& chain, seconds latency) {
  check(chain, latency);
  double const rate = chain.arrivals_per_s;
  double const answer = 1.0 / chain.service.count();
  double const rho = rate / answer;
  if (rho >= 1.0) {
    return {.mean_response = forever};
  }
  double const ready = chain.load.count() > 0.0 ? 1.0 / chain.load.count() : at_once;
  double const r = rate * chain.load.count() / (1.0 + rate * chain.load.count());

  // Level 0 has a mass of one until all is normalised; level 1 follows by what flows out of its states.
  double const idle_cold =
      chain.idle_timeout == forever ? 0.0 : 1.0 / (1.0 + rate * chain.idle_timeout.count());
  double const idle_warm = 1.0 - idle_cold;
  double const busy_cold = chain.cold_share * r * idle_cold;
  double const busy_warm = rho;

  double const cold_queue = answer * (1.0 - r);  // rate of a geometric sum of services
  double const warm_queue = answer * (1.0 - rho);
  std::array<found, 5> const all{{
      {idle_warm + idle_cold * (1.0 - chain.cold_share), {at_once, at_once, answer}},
      {idle_cold * chain.cold_share, {at_once, ready, answer}},
      {busy_cold / (1.0 - r), {ready, answer, cold_queue}},
      {busy_warm / (1.0 - rho), {at_once, answer, warm_queue}},
      {busy_cold * rho / ((1.0 - r) * (1.0 - rho)), {answer, cold_queue, warm_queue}},
  }};
  partial_warmth_result result;
  double mass = 0.0;
  for (auto const& each : all) {
    mass += each.mass;
    stages sorted = each.rates;
    std::sort(sorted.begin(), sorted.end(), std::greater{});
    result.share_within += each.mass * share_through(sorted, latency.count());
    for (double const stage : each.rates) {
      result.mean_response += seconds{each.mass / stage};
    }
  }
  result.share_within /= mass;
  result.mean_response /= mass;
  result.released_share = idle_cold / mass;
  result.warm_idle_share = idle_warm / mass;
  return result;
}

}  // namespace sluice::scheduler
