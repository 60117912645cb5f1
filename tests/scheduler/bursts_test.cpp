#include "scheduler/bursts.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

queue_load busy(double service_scv) {
  return {.arrivals_per_s = 8.0, .service = distribution::gamma(seconds{0.1}, service_scv)};
}

// Allen and Cunneen: for an scv of 4 and of 1 half of five times ρ/(1 − ρ)·b.
TEST(mean_wait_by_spread, follows_both_spreads) {
  EXPECT_NEAR(mean_wait_by_spread(busy(1.0), 4.0).count(), 1.0, 1e-9);
  EXPECT_NEAR(mean_wait_by_spread(busy(1.0), 1.0).count(), 0.4, 1e-9);
  EXPECT_NEAR(mean_wait_by_spread(busy(0.0), 1.0).count(), 0.2, 1e-9);
}

// D/M/1 at ρ = 0.8, whose exact wait is 0.16957 s: Krämer and Langenbach-Belz miss it by 0.2 %.
TEST(mean_wait_by_spread, is_corrected_for_gaps_that_are_more_even) {
  EXPECT_NEAR(mean_wait_by_spread(busy(1.0), 0.0).count(), 0.169296, 5e-7);
}

TEST(mean_wait_by_spread, vanishes_where_nothing_varies) {
  EXPECT_EQ(mean_wait_by_spread(busy(0.0), 0.0).count(), 0.0);
  queue_load const full{.arrivals_per_s = 10.0, .service = distribution::gamma(seconds{0.1}, 0.0)};
  EXPECT_EQ(mean_wait_by_spread(full, 0.0), forever);
  EXPECT_EQ(mean_wait_by_spread({.arrivals_per_s = 0.0}, 4.0).count(), 0.0);
}

// Neuts: by the matrix R of a chain whose levels are the number in the system.
TEST(mean_wait, of_a_switching_stream_is_many_times_poissons) {
  switching_poisson const stream{.rates_per_s = {18.0, 2.0}, .switches_per_s = {0.1, 0.1}};
  EXPECT_NEAR(stream.mean_rate_per_s(), 10.0, 1e-12);
  EXPECT_NEAR(mean_wait(stream, seconds{0.05}).count(), 0.298954, 5e-7);
}

TEST(mean_wait, of_a_stream_with_twice_the_same_rate_is_of_mm1) {
  for (double const rate : {0.001, 5.0, 9.9}) {
    switching_poisson const stream{.rates_per_s = {rate, rate}, .switches_per_s = {0.3, 2.0}};
    double const rho = 0.1 * rate;
    EXPECT_NEAR(mean_wait(stream, seconds{0.1}).count(), 0.1 * rho / (1.0 - rho), 1e-6) << rate;
  }
}

TEST(mean_wait, of_a_stream_that_is_silent_at_times_is_finite) {
  switching_poisson const stream{.rates_per_s = {10.0, 0.0}, .switches_per_s = {1.0, 1.0}};
  double const wait = mean_wait(stream, seconds{0.1}).count();
  EXPECT_GT(wait, 0.1);  // more than at the mean rate
  EXPECT_LT(wait, 10.0);
  switching_poisson const silent{.rates_per_s = {0.0, 0.0}, .switches_per_s = {1.0, 1.0}};
  EXPECT_EQ(mean_wait(silent, seconds{0.1}).count(), 0.0);
}

TEST(mean_wait, of_a_stream_beyond_the_servers_rate_is_forever) {
  switching_poisson const stream{.rates_per_s = {18.0, 2.0}, .switches_per_s = {0.1, 0.1}};
  EXPECT_EQ(mean_wait(stream, seconds{0.1}), forever);
}

TEST(bursts, refuse_numbers_without_meaning) {
  EXPECT_THROW((void)mean_wait_by_spread(busy(1.0), -0.1), std::invalid_argument);
  switching_poisson const stuck{.rates_per_s = {1.0, 1.0}, .switches_per_s = {0.0, 1.0}};
  EXPECT_THROW((void)mean_wait(stuck, seconds{0.1}), std::invalid_argument);
  switching_poisson const nan{.rates_per_s = {std::numeric_limits<double>::quiet_NaN(), 1.0},
                              .switches_per_s = {1.0, 1.0}};
  EXPECT_THROW((void)mean_wait(nan, seconds{0.1}), std::invalid_argument);
  switching_poisson const good{.rates_per_s = {1.0, 1.0}, .switches_per_s = {1.0, 1.0}};
  EXPECT_THROW((void)mean_wait(good, seconds{0.0}), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
