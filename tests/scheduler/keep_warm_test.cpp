#include "scheduler/keep_warm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

keep_warm_costs const costs{.per_held_s = 1.0, .per_load = 2.0};

TEST(keep_warm_cost, of_exponential_gaps_is_the_same_for_all_timeouts_where_both_costs_are) {
  distribution const gaps = distribution::gamma(seconds{2.0}, 1.0);
  for (double const t : {0.0, 0.1, 1.0, 10.0, 1000.0}) {
    EXPECT_NEAR(keep_warm_cost(gaps, costs, seconds{t}), 2.0, 1e-9) << t;
  }
  EXPECT_NEAR(keep_warm_cost(gaps, costs, forever), 2.0, 1e-9);
}

TEST(cheapest_timeout, of_exponential_gaps_is_all_or_nothing) {
  EXPECT_EQ(cheapest_timeout(distribution::gamma(seconds{1.9}, 1.0), costs).idle_timeout, forever);
  EXPECT_EQ(cheapest_timeout(distribution::gamma(seconds{2.1}, 1.0), costs).idle_timeout.count(),
            0.0);
}

// Hyperexponential: nine gaps in ten have 0.1 s on average, one has 20 s.
TEST(cheapest_timeout, outlasts_short_gaps_and_gives_long_ones_up) {
  distribution const gaps =
      distribution::mixture({{.weight = 0.9, .mean = seconds{0.1}, .scv = 1.0},
                             {.weight = 0.1, .mean = seconds{20.0}, .scv = 1.0}});
  auto const best = cheapest_timeout(gaps, costs);
  EXPECT_NEAR(best.idle_timeout.count(), 0.5273, 5e-5);
  EXPECT_NEAR(best.cost_per_gap, 0.34561, 5e-6);
  EXPECT_NEAR(keep_warm_cost(gaps, costs, seconds{0.0}), 2.0, 1e-9);
  EXPECT_NEAR(keep_warm_cost(gaps, costs, seconds{2.0}), 0.461293, 5e-7);
  EXPECT_NEAR(keep_warm_cost(gaps, costs, forever), 2.09, 1e-9);
}

TEST(cheapest_timeout, of_gaps_of_known_length_is_just_that_length) {
  EXPECT_NEAR(keep_warm_cost(distribution::gamma(seconds{1.5}, 0.0), costs, seconds{1.5}), 1.5,
              1e-9);
  EXPECT_LE(cheapest_timeout(distribution::gamma(seconds{1.5}, 0.0), costs).cost_per_gap,
            1.5 + 1e-6);
  EXPECT_EQ(cheapest_timeout(distribution::gamma(seconds{2.5}, 0.0), costs).idle_timeout.count(),
            0.0);
}

TEST(competitive_timeout, costs_at_most_twice_what_foresight_does) {
  seconds const timeout = competitive_timeout(costs);
  EXPECT_EQ(timeout.count(), 2.0);
  for (double gap = 0.01; gap < 100.0; gap *= 1.1) {
    double const foreseen = std::min(costs.per_held_s * gap, costs.per_load);
    EXPECT_LE(keep_warm_cost(distribution::gamma(seconds{gap}, 0.0), costs, timeout),
              2.0 * foreseen + 1e-9)
        << gap;
  }
  EXPECT_EQ(competitive_timeout({.per_held_s = 0.0, .per_load = 1.0}), forever);
}

TEST(keep_warm, refuses_numbers_without_meaning) {
  distribution const gaps = distribution::gamma(seconds{2.0}, 1.0);
  EXPECT_THROW((void)keep_warm_cost(gaps, {.per_held_s = -1.0}, seconds{1.0}),
               std::invalid_argument);
  EXPECT_THROW((void)keep_warm_cost(gaps, costs, seconds{-1.0}), std::invalid_argument);
  EXPECT_THROW((void)competitive_timeout({.per_load = forever.count()}), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
