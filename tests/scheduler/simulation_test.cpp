// Holds the formulas against an event-by-event simulation that shares no code with them: one
// server, first come first served, released after an idle timeout, loaded again by the next
// arrival.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "scheduler/attainment.hpp"
#include "scheduler/queueing.hpp"

namespace sluice::scheduler {
namespace {

/// xorshift64*: the same draws on every platform.
class draws {
 public:
  double uniform() {  // in (0, 1)
    state_ ^= state_ >> 12U;
    state_ ^= state_ << 25U;
    state_ ^= state_ >> 27U;
    return (static_cast<double>((state_ * 2685821657736338717ULL) >> 11U) + 0.5) * 0x1p-53;
  }
  double exponential(double mean) { return -mean * std::log(uniform()); }
  /// Sum of `stages` exponentials; a constant for 0 stages.
  double erlang(double mean, int stages) {
    double sum = stages == 0 ? mean : 0.0;
    for (int i = 0; i < stages; ++i) {
      sum += exponential(mean / stages);
    }
    return sum;
  }

 private:
  std::uint64_t state_ = 0x9E3779B97F4A7C15ULL;
};

/// A duration that is `short_s` or, with probability `long_share`, `long_s`, either spread over
/// Erlang stages.
struct kinds {
  double short_s = 0.0;
  double long_s = 0.0;
  double long_share = 0.0;
  int stages = 0;

  double draw(draws& random) const {
    bool const is_long = long_share > 0.0 && random.uniform() < long_share;
    return random.erlang(is_long ? long_s : short_s, stages);
  }
  distribution as_distribution() const {
    double const scv = stages == 0 ? 0.0 : 1.0 / stages;
    std::vector<distribution::part> parts{
        {.weight = 1.0 - long_share, .mean = seconds{short_s}, .scv = scv}};
    if (long_share > 0.0) {
      parts.push_back({.weight = long_share, .mean = seconds{long_s}, .scv = scv});
    }
    return distribution::mixture(parts);
  }
};

struct setting {
  std::string name;
  double rate;
  kinds service;
  kinds load;
  double timeout;
  double latency;
};

void PrintTo(setting const& one, std::ostream* to) {
  *to << one.name;
}

struct outcome {
  double mean_wait = 0.0;
  double within = 0.0;
  double released = 0.0;
  double loads_per_s = 0.0;
};

outcome simulate(setting const& s, int requests) {
  draws random;
  double now = 0.0;
  double free_at = 0.0;
  double waits = 0.0;
  double released = 0.0;
  double loads = 0.0;
  double within = 0.0;
  for (int i = 0; i < requests; ++i) {
    now += random.exponential(1.0 / s.rate);
    double start = std::max(now, free_at);
    if (now - free_at > s.timeout) {
      released += now - free_at - s.timeout;
      loads += 1.0;
      start += s.load.draw(random);
    }
    free_at = start + s.service.draw(random);
    waits += start - now;
    within += free_at - now <= s.latency ? 1.0 : 0.0;
  }
  return {waits / requests, within / requests, released / now, loads / now};
}

class simulated : public testing::TestWithParam<setting> {};

TEST_P(simulated, agrees_with_the_formulas) {
  setting const& s = GetParam();
  outcome const seen = simulate(s, 1'000'000);
  queue_load const demand{.arrivals_per_s = s.rate,
                          .service = s.service.as_distribution(),
                          .load = s.load.as_distribution()};
  double const p = poisson_exceed(s.rate, seconds{s.timeout});
  attainment_model const model{demand.service, demand.load, seconds{s.latency}};

  EXPECT_NEAR(mean_wait(demand, p).count() / seen.mean_wait, 1.0, 0.015);
  EXPECT_NEAR(model.at(s.rate).share_within(p), seen.within, 0.003);
  EXPECT_NEAR(cycle_of(demand, p).released_fraction, seen.released, 0.01 * seen.released + 1e-4);
  EXPECT_NEAR(cycle_of(demand, p).loads_per_s, seen.loads_per_s, 0.02 * seen.loads_per_s + 1e-4);
}

INSTANTIATE_TEST_SUITE_P(
    settings, simulated,
    testing::Values(
        setting{"released_at_once", 0.5, {.short_s = 0.1, .stages = 1}, {.short_s = 2.0}, 0.0, 2.3},
        setting{"three_seconds", 0.5, {.short_s = 0.1, .stages = 1}, {.short_s = 2.0}, 3.0, 0.5},
        setting{"three_seconds_random_load",
                0.5,
                {.short_s = 0.1, .stages = 1},
                {.short_s = 2.0, .stages = 1},
                3.0,
                1.0},
        setting{"busy_constant_service",
                8.0,
                {.short_s = 0.1},
                {.short_s = 0.3, .stages = 4},
                0.2,
                0.6},
        setting{"mixed_services",
                5.0,
                {.short_s = 0.05, .long_s = 0.5, .long_share = 0.1},
                {.short_s = 1.0, .stages = 2},
                0.5,
                0.9},
        setting{"tight_latency",
                20.0,
                {.short_s = 0.01, .stages = 3},
                {.short_s = 0.04, .long_s = 0.3, .long_share = 0.05},
                0.1,
                0.05},
        setting{"loose_latency",
                2.0,
                {.short_s = 0.005, .stages = 1},
                {.short_s = 0.5, .stages = 1},
                1.0,
                4.0}),
    [](auto const& of) { return of.param.name; });

}  // namespace
}  // namespace sluice::scheduler
