#include "scheduler/calibration.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

TEST(corrected_share, keeps_the_order_and_is_undone) {
  for (double const log_odds : {-5.0, -1.0, 0.0, 0.3, 4.0}) {
    double before = -1.0;
    for (double share = 0.0; share <= 1.0; share += 0.001) {
      double const now = corrected_share(share, log_odds);
      ASSERT_GE(now, before);
      ASSERT_LE(now, 1.0);
      before = now;
    }
    for (double const wanted : {0.05, 0.5, 0.9}) {
      double const share = uncorrected_share(wanted, log_odds);
      if (share <= 1.0) {
        EXPECT_GE(corrected_share(share, log_odds), wanted);
      } else {
        EXPECT_LT(corrected_share(1.0, log_odds), wanted);
      }
    }
  }
  EXPECT_EQ(corrected_share(0.999, 0.0), 0.999);
  EXPECT_NEAR(corrected_share(0.5, std::log(3.0)), 0.75, 1e-12);
}

/// `seconds_long` ticks with 20 requests each.
void play(calibration& to, int seconds_long, double predicted, double really, unsigned seed) {
  std::mt19937_64 random{seed};
  std::binomial_distribution<std::uint64_t> within{20, really};
  for (int i = 0; i < seconds_long; ++i) {
    to.add(seconds{1.0}, 20, within(random), predicted);
  }
}

TEST(calibration, leaves_a_right_prediction_alone_nearly_always) {
  int corrected = 0;
  for (unsigned seed = 0; seed < 100; ++seed) {
    calibration seen{seconds{300.0}};
    play(seen, 600, 0.9, 0.9, seed);
    corrected += seen.log_odds() != 0.0 ? 1 : 0;
    EXPECT_NEAR(seen.corrected(0.9), 0.9, 0.03);
    EXPECT_LT(seen.half_width(), 0.03);
  }
  EXPECT_LE(corrected, 30);
}

TEST(calibration, meets_what_is_observed_where_the_prediction_stays_wrong) {
  calibration seen{seconds{300.0}};
  play(seen, 600, 0.997, 0.46, 1);
  EXPECT_LT(seen.log_odds(), 0.0);
  EXPECT_NEAR(seen.corrected(0.997), 0.46, 0.03);
  EXPECT_LT(seen.corrected(0.9), seen.corrected(0.997));
}

TEST(calibration, corrects_upwards_likewise) {
  calibration seen{seconds{300.0}};
  play(seen, 600, 0.3, 0.8, 1);
  EXPECT_NEAR(seen.corrected(0.3), 0.8, 0.03);
}

TEST(calibration, forgets_a_correction_when_the_prediction_is_right_again) {
  calibration seen{seconds{60.0}};
  play(seen, 300, 0.95, 0.5, 1);
  ASSERT_NEAR(seen.corrected(0.95), 0.5, 0.05);
  play(seen, 900, 0.95, 0.95, 2);
  EXPECT_NEAR(seen.corrected(0.95), 0.95, 0.03);
}

TEST(calibration, takes_misses_in_clusters_for_less_evidence_than_single_ones) {
  calibration clustered{seconds{300.0}};
  calibration single{seconds{300.0}};
  for (int i = 0; i < 600; ++i) {
    clustered.add(seconds{1.0}, 20, i % 100 < 10 ? 0 : 20, 0.9);  // a tenth, ten seconds in turn
    single.add(seconds{1.0}, 20, 18, 0.9);
  }
  EXPECT_GT(clustered.half_width(), 2.0 * single.half_width());
}

TEST(calibration, corrects_nothing_before_it_has_seen_enough) {
  calibration seen{seconds{300.0}};
  seen.add(seconds{1.0}, 20, 0, 0.99);
  EXPECT_EQ(seen.log_odds(), 0.0);
  EXPECT_EQ(seen.half_width(), 1.0);
}

TEST(calibration, refuses_a_window_that_is_none) {
  EXPECT_THROW(calibration{seconds{0.0}}, std::invalid_argument);
  EXPECT_THROW(calibration{forever}, std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
