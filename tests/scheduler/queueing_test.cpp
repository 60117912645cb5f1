#include "scheduler/queueing.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

distribution exponential(double mean) {
  return distribution::gamma(seconds{mean}, 1.0);
}
distribution constant(double value) {
  return distribution::gamma(seconds{value}, 0.0);
}

// Half a request per second, 100 ms of exponential service, two seconds of load.
queue_load const rare{.arrivals_per_s = 0.5, .service = exponential(0.1), .load = constant(2.0)};

TEST(mean_warm_wait, of_mm1_and_md1_is_pollaczek_khinchine) {
  EXPECT_NEAR(mean_warm_wait({.arrivals_per_s = 8.0, .service = exponential(0.1)}).count(), 0.4,
              1e-12);
  EXPECT_NEAR(mean_warm_wait({.arrivals_per_s = 8.0, .service = constant(0.1)}).count(), 0.2,
              1e-12);
}

TEST(mean_warm_wait, of_mixed_services_follows_the_second_moment) {
  distribution const exponentials =
      distribution::mixture({{.weight = 0.9, .mean = seconds{0.02}, .scv = 1.0},
                             {.weight = 0.1, .mean = seconds{0.2}, .scv = 1.0}});
  distribution const constants = distribution::mixture(
      {{.weight = 0.9, .mean = seconds{0.05}}, {.weight = 0.1, .mean = seconds{0.5}}});
  EXPECT_NEAR(mean_warm_wait({.arrivals_per_s = 10.0, .service = exponentials}).count(), 0.070323,
              5e-7);
  EXPECT_NEAR(mean_warm_wait({.arrivals_per_s = 5.0, .service = constants}).count(), 0.129762,
              5e-7);
}

TEST(mean_wait, with_a_load_at_every_idle_gap) {
  EXPECT_NEAR(mean_wait(rare, 1.0).count(), 1.505263, 5e-7);
  EXPECT_NEAR(cycle_of(rare, 1.0).released_fraction, 0.475, 1e-12);
}

TEST(mean_wait, with_an_idle_timeout) {
  double const p = poisson_exceed(0.5, seconds{3.0});
  EXPECT_NEAR(p, 0.223130, 5e-7);
  EXPECT_NEAR(mean_wait(rare, p).count(), 0.552540, 5e-7);
  cycle const round = cycle_of(rare, p);
  EXPECT_NEAR(round.released_fraction, 0.173304, 5e-7);
  EXPECT_NEAR(round.cold_or_loading, 0.346608, 5e-7);
  EXPECT_NEAR(round.loads_per_s, 0.5 * 0.173304, 5e-7);
  // A cycle is idle for 1/λ, of which p/λ released: the same fraction, counted by time.
  EXPECT_NEAR(p / 0.5 / round.length.count(), round.released_fraction, 1e-12);
}

TEST(mean_wait, with_an_exponential_load) {
  queue_load demand = rare;
  demand.load = exponential(2.0);
  EXPECT_NEAR(mean_wait(demand, poisson_exceed(0.5, seconds{3.0})).count(), 0.734965, 5e-7);
}

// By decomposition, and confirmed by simulations of 2·10⁷ requests: 0.6250 s, held 0.8969 of the time.
TEST(with_teardown, who_comes_during_it_waits_for_its_end_and_the_load) {
  double const p = poisson_exceed(0.5, seconds{3.0});
  auto const effect = with_teardown(rare, p, seconds{1.0});
  EXPECT_NEAR(effect.mean_wait.count(), 0.624971, 5e-7);
  EXPECT_NEAR(effect.held_fraction, 0.896890, 5e-7);
}

TEST(with_teardown, of_no_length_changes_nothing) {
  for (double const p : {0.0, 0.2, 1.0}) {
    auto const effect = with_teardown(rare, p, seconds{0.0});
    EXPECT_NEAR(effect.mean_wait.count(), mean_wait(rare, p).count(), 1e-12);
    EXPECT_NEAR(effect.held_fraction, 1.0 - cycle_of(rare, p).released_fraction, 1e-12);
  }
  EXPECT_EQ(with_teardown({.arrivals_per_s = 0.0, .load = constant(2.0)}, 1.0, seconds{1.0})
                .held_fraction,
            0.0);
}

TEST(mean_wait_of_gathering, adds_the_time_in_which_they_gather) {
  queue_load at_once = rare;
  at_once.load = distribution{};
  EXPECT_NEAR(mean_wait_of_gathering(at_once, 4).count(), 3.005263, 5e-7);
  EXPECT_NEAR(mean_wait_of_gathering(rare, 4).count(), 4.205263, 5e-7);
  EXPECT_NEAR(mean_wait_of_gathering(rare, 1).count(), mean_wait(rare, 1.0).count(), 1e-12);
  EXPECT_EQ(mean_wait_of_gathering({.arrivals_per_s = 0.0}, 2), forever);
  EXPECT_THROW((void)mean_wait_of_gathering(rare, 0), std::invalid_argument);
}

TEST(mean_wait_behind, adds_what_is_left_of_what_the_device_does_else) {
  EXPECT_NEAR(mean_wait_behind(rare, constant(0.2)).count(), mean_warm_wait(rare).count() + 0.1,
              1e-12);
  EXPECT_NEAR(mean_wait_behind(rare, exponential(0.2)).count(), mean_warm_wait(rare).count() + 0.2,
              1e-12);
  EXPECT_EQ(mean_wait_behind(rare, distribution{}), mean_warm_wait(rare));
}

TEST(exceed_for_extra_wait, is_the_inverse_of_the_mean_wait) {
  double const p = exceed_for_extra_wait(rare, seconds{0.1});
  EXPECT_NEAR(p, 0.034483, 5e-7);
  EXPECT_NEAR(poisson_timeout(0.5, p).count(), 6.7346, 5e-5);
  EXPECT_NEAR(1.0 - cycle_of(rare, p).released_fraction, 0.968333, 5e-7);
  EXPECT_NEAR((mean_wait(rare, p) - mean_warm_wait(rare)).count(), 0.1, 1e-12);
  EXPECT_EQ(exceed_for_extra_wait(rare, seconds{100.0}), 1.0);
  EXPECT_EQ(exceed_for_extra_wait(rare, seconds{0.0}), 0.0);
  EXPECT_EQ(poisson_timeout(0.5, 1.0).count(), 0.0);
  EXPECT_EQ(poisson_timeout(0.5, 0.0), forever);
}

TEST(mean_wait, of_measured_load_times_with_long_services) {
  // Moments of a public trace of generation requests; the distributions are gammas with just these moments.
  double const s1 = 21.9938;
  double const b1 = 38.9985;
  queue_load const demand{.arrivals_per_s = 0.01,
                          .service = distribution::gamma(seconds{b1}, 2150.969 / (b1 * b1) - 1.0),
                          .load = distribution::gamma(seconds{s1}, 741.006 / (s1 * s1) - 1.0)};
  EXPECT_NEAR(mean_wait(demand, 1.0).count(), 38.6961, 5e-5);
  EXPECT_NEAR(mean_wait(demand, poisson_exceed(0.01, seconds{60.0})).count(), 30.2152, 5e-5);
  EXPECT_NEAR(mean_wait(demand, poisson_exceed(0.01, seconds{300.0})).count(), 18.8961, 5e-5);
  EXPECT_NEAR(mean_wait(demand, poisson_exceed(0.01, forever)).count(), 17.6305, 5e-5);
}

TEST(mean_wait, never_falls_when_idle_gaps_outlast_the_timeout_more_often) {
  for (double const rate : {0.01, 0.5, 5.0, 9.9}) {
    queue_load const demand{.arrivals_per_s = rate,
                            .service = exponential(0.1),
                            .load = distribution::gamma(seconds{0.7}, 0.5)};
    for (double p = 0.0; p < 1.0; p += 0.05) {
      EXPECT_LE(mean_wait(demand, p), mean_wait(demand, std::min(1.0, p + 0.05)));
      EXPECT_LE(cycle_of(demand, p).released_fraction,
                cycle_of(demand, std::min(1.0, p + 0.05)).released_fraction);
      EXPECT_LE(cycle_of(demand, p).loads_per_s,
                cycle_of(demand, std::min(1.0, p + 0.05)).loads_per_s);
    }
  }
}

TEST(an_overloaded_queue, waits_forever_and_releases_nothing) {
  for (double const rate : {10.0, 12.0}) {
    queue_load const demand{
        .arrivals_per_s = rate, .service = constant(0.1), .load = constant(2.0)};
    EXPECT_EQ(mean_warm_wait(demand), forever);
    EXPECT_EQ(mean_wait(demand, 0.5), forever);
    EXPECT_EQ(cycle_of(demand, 1.0).released_fraction, 0.0);
    EXPECT_EQ(cycle_of(demand, 1.0).loads_per_s, 0.0);
    EXPECT_EQ(lundberg_tail(demand).probability_above(seconds{1e6}), 1.0);
    EXPECT_EQ(lundberg_tail(demand).quantile(0.5), forever);
  }
}

TEST(a_queue_without_arrivals, is_released_all_the_time_that_the_timeout_allows) {
  queue_load const demand{.arrivals_per_s = 0.0, .service = constant(0.1), .load = constant(2.0)};
  EXPECT_EQ(mean_warm_wait(demand).count(), 0.0);
  EXPECT_EQ(mean_wait(demand, 1.0).count(), 2.0);
  EXPECT_EQ(poisson_exceed(0.0, seconds{100.0}), 1.0);
  EXPECT_EQ(poisson_exceed(0.0, forever), 0.0);
  EXPECT_EQ(cycle_of(demand, 1.0).released_fraction, 1.0);
  EXPECT_EQ(cycle_of(demand, 1.0).loads_per_s, 0.0);
  EXPECT_EQ(lundberg_tail(demand).probability_above(seconds{0.0}), 0.0);
}

TEST(lundberg_tail, is_exact_for_mm1) {
  queue_load const demand{.arrivals_per_s = 8.0, .service = exponential(0.1)};
  wait_tail const tail = lundberg_tail(demand);
  EXPECT_NEAR(tail.quantile(0.99).count(), std::log(80.0) / 2.0, 1e-9);
  EXPECT_NEAR(tail.probability_above(seconds{0.0}), 0.8, 1e-9);
}

TEST(lundberg_tail, of_other_services_has_the_known_quantiles) {
  queue_load const constant_service{.arrivals_per_s = 8.0, .service = constant(0.1)};
  EXPECT_NEAR(lundberg_tail(constant_service).quantile(0.99).count(), 1.0356, 5e-5);
  queue_load const exponentials{
      .arrivals_per_s = 10.0,
      .service = distribution::mixture({{.weight = 0.9, .mean = seconds{0.02}, .scv = 1.0},
                                        {.weight = 0.1, .mean = seconds{0.2}, .scv = 1.0}})};
  EXPECT_NEAR(lundberg_tail(exponentials).quantile(0.99).count(), 0.8593, 5e-5);
  queue_load const constants{
      .arrivals_per_s = 5.0,
      .service = distribution::mixture(
          {{.weight = 0.9, .mean = seconds{0.05}}, {.weight = 0.1, .mean = seconds{0.5}}})};
  EXPECT_NEAR(lundberg_tail(constants).quantile(0.99).count(), 1.0493, 5e-5);
}

TEST(lundberg_tail, solves_its_equation_from_light_to_heavy_traffic) {
  for (double const rho : {0.01, 0.3, 0.9, 0.999}) {
    for (double const scv : {0.0, 0.3, 1.0, 6.0}) {
      queue_load const demand{.arrivals_per_s = rho / 0.1,
                              .service = distribution::gamma(seconds{0.1}, scv)};
      wait_tail const tail = lundberg_tail(demand);
      ASSERT_TRUE(std::isfinite(tail.decay_per_s)) << rho << ' ' << scv;
      double const left = demand.arrivals_per_s * (demand.service.mgf(tail.decay_per_s) - 1.0);
      EXPECT_NEAR(left / tail.decay_per_s, 1.0, 1e-5) << rho << ' ' << scv;
      EXPECT_GT(tail.prefactor, 0.0);
    }
  }
}

TEST(lundberg_tail, vanishes_with_the_traffic) {
  for (double const scv : {0.0, 1.0, 6.0}) {
    wait_tail const tail =
        lundberg_tail({.arrivals_per_s = 1e-5, .service = distribution::gamma(seconds{0.1}, scv)});
    EXPECT_LT(tail.probability_above(seconds{0.05}), 1e-4) << scv;
    EXPECT_EQ(tail.quantile(0.99).count(), 0.0) << scv;
  }
}

TEST(queueing, refuses_numbers_without_meaning) {
  queue_load const negative{.arrivals_per_s = -1.0};
  queue_load const nan{.arrivals_per_s = std::numeric_limits<double>::quiet_NaN()};
  EXPECT_THROW((void)mean_warm_wait(negative), std::invalid_argument);
  EXPECT_THROW((void)lundberg_tail(nan), std::invalid_argument);
  EXPECT_THROW((void)mean_wait(rare, 1.1), std::invalid_argument);
  EXPECT_THROW((void)cycle_of(rare, -0.1), std::invalid_argument);
  EXPECT_THROW((void)with_teardown(rare, 0.5, seconds{-1.0}), std::invalid_argument);
  EXPECT_THROW((void)exceed_for_extra_wait(rare, forever), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
