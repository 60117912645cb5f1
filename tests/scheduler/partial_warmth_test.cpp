#include "scheduler/partial_warmth.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

// Shi and others, Sirius, USENIX ATC 2025; what it was configured for: 56 models on one device, 7.3 ms of service, a load of 9.8 ms and 5 ms more for those whose memory
// is training's, a latency of four services, and a reserve that holds 9.385 % of all models.
partial_warmth sirius(double requests_per_s) {
  double const cold = 1.0 - 0.09385311;
  return {.arrivals_per_s = requests_per_s / 56.0,
          .service = seconds{0.0073},
          .load = seconds{0.0098 + cold * 0.005},
          .idle_timeout = seconds{5.0},
          .cold_share = cold};
}

TEST(partial_warmth, has_the_shares_of_sirius_four_workloads) {
  seconds const latency{0.0292};
  EXPECT_NEAR(solve(sirius(98.2), latency).share_within, 0.959, 5e-4);  // heavy
  EXPECT_NEAR(solve(sirius(29.9), latency).share_within, 0.925, 5e-4);  // burst
  EXPECT_NEAR(solve(sirius(3.5), latency).share_within, 0.824, 5e-4);   // light
  EXPECT_NEAR(solve(sirius(20.7), latency).share_within, 0.909, 1e-3);  // functions
}

// The balance of the same chain, cut off at 200 requests and solved as a dense system, each response by a matrix exponential.
TEST(partial_warmth, agrees_with_the_chain_solved_as_one_system_where_queues_are_long) {
  auto chain = sirius(5600.0);
  chain.cold_share = 1.0 - 0.0938;
  chain.load = seconds{0.0098 + chain.cold_share * 0.005};
  EXPECT_NEAR(solve(chain, seconds{0.0292}).share_within, 0.6593685, 1e-6);
  partial_warmth const half{.arrivals_per_s = 60.0,
                            .service = seconds{0.0073},
                            .load = seconds{0.1},
                            .idle_timeout = seconds{0.02},
                            .cold_share = 0.5};
  EXPECT_NEAR(solve(half, seconds{0.15}).share_within, 0.8273940, 1e-6);
}

TEST(partial_warmth, that_is_never_released_or_loads_at_once_is_mm1) {
  double const mm1 = 1.0 - std::exp(-(10.0 - 8.0) * 0.7);
  partial_warmth chain{.arrivals_per_s = 8.0,
                       .service = seconds{0.1},
                       .load = seconds{2.0},
                       .idle_timeout = forever};
  auto const warm = solve(chain, seconds{0.7});
  EXPECT_NEAR(warm.share_within, mm1, 1e-9);
  EXPECT_NEAR(warm.mean_response.count(), 0.5, 1e-9);
  EXPECT_EQ(warm.released_share, 0.0);
  EXPECT_NEAR(warm.warm_idle_share, 0.2, 1e-12);
  chain.idle_timeout = seconds{1.0};
  chain.cold_share = 0.0;
  EXPECT_NEAR(solve(chain, seconds{0.7}).share_within, mm1, 1e-9);
  chain.cold_share = 1.0;
  chain.load = seconds{0.0};
  EXPECT_NEAR(solve(chain, seconds{0.7}).share_within, mm1, 1e-9);
}

TEST(partial_warmth, that_is_released_at_once_waits_as_an_mg1_queue_with_setup) {
  // λ = 0.5, b = 0.1 s, exponential loads of 2 s: s₂ = 8 s².
  partial_warmth const chain{.arrivals_per_s = 0.5,
                             .service = seconds{0.1},
                             .load = seconds{2.0},
                             .idle_timeout = seconds{0.0}};
  auto const solved = solve(chain, seconds{1.0});
  double const wait = 0.005 / 0.95 + (2.0 * 2.0 + 0.5 * 8.0) / (2.0 * (1.0 + 0.5 * 2.0));
  EXPECT_NEAR(solved.mean_response.count(), wait + 0.1, 1e-9);
  EXPECT_NEAR(solved.released_share, 0.475, 1e-9);
}

TEST(partial_warmth, keeps_to_shares_at_the_ends_of_its_range) {
  for (double const rate : {0.0, 1e-9, 1.0, 9.999999}) {
    for (double const load : {0.0, 1e-9, 0.1, 1e6}) {
      for (double const timeout : {0.0, 1e-9, 1e9, forever.count()}) {
        partial_warmth const chain{.arrivals_per_s = rate,
                                   .service = seconds{0.1},
                                   .load = seconds{load},
                                   .idle_timeout = seconds{timeout},
                                   .cold_share = 0.5};
        for (double const latency : {0.0, 1e-6, 0.3, 1e9}) {
          double const share = solve(chain, seconds{latency}).share_within;
          ASSERT_GE(share, 0.0) << rate << ' ' << load << ' ' << timeout << ' ' << latency;
          ASSERT_LE(share, 1.0 + 1e-9) << rate << ' ' << load << ' ' << timeout << ' ' << latency;
        }
      }
    }
  }
  EXPECT_EQ(solve({.arrivals_per_s = 10.0, .service = seconds{0.1}}, seconds{1.0}).share_within,
            0.0);
}

TEST(partial_warmth, refuses_numbers_without_meaning) {
  partial_warmth good = sirius(10.0);
  EXPECT_THROW((void)solve(good, seconds{-1.0}), std::invalid_argument);
  auto bad = good;
  bad.cold_share = 1.5;
  EXPECT_THROW((void)solve(bad, seconds{1.0}), std::invalid_argument);
  bad = good;
  bad.service = seconds{0.0};
  EXPECT_THROW((void)solve(bad, seconds{1.0}), std::invalid_argument);
  bad = good;
  bad.arrivals_per_s = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)solve(bad, seconds{1.0}), std::invalid_argument);
  bad = good;
  bad.idle_timeout = seconds{-1.0};
  EXPECT_THROW((void)solve(bad, seconds{1.0}), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
