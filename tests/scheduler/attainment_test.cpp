#include "scheduler/attainment.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "scheduler/queueing.hpp"

namespace sluice::scheduler {
namespace {

distribution exponential(double mean) {
  return distribution::gamma(seconds{mean}, 1.0);
}
distribution constant(double value) {
  return distribution::gamma(seconds{value}, 0.0);
}

TEST(attainment, of_a_warm_mm1_queue_is_the_exponential_response_distribution) {
  for (double const rate : {0.1, 5.0, 8.0, 9.5}) {
    for (double const latency : {0.05, 0.3, 1.0, 4.0}) {
      attainment_model const model{exponential(0.1), distribution{}, seconds{latency}};
      double const exact = 1.0 - std::exp(-(10.0 - rate) * latency);
      EXPECT_NEAR(model.at(rate).warm, exact, 2e-3) << rate << ' ' << latency;
    }
  }
}

TEST(attainment, of_a_warm_queue_misses_by_lundbergs_tail_far_out) {
  // P(wait + service > t) ≈ C e^{−θt} E[e^{θB}], where the service is short against t.
  distribution const service = distribution::mixture(
      {{.weight = 0.9, .mean = seconds{0.05}}, {.weight = 0.1, .mean = seconds{0.5}}});
  wait_tail const tail = lundberg_tail({.arrivals_per_s = 5.0, .service = service});
  double const latency = 2.0;
  double const misses = tail.probability_above(seconds{latency}) * service.mgf(tail.decay_per_s);
  attainment_model const model{service, distribution{}, seconds{latency}};
  EXPECT_NEAR((1.0 - model.at(5.0).warm) / misses, 1.0, 0.02);
}

TEST(attainment, of_a_cold_start_is_load_plus_service) {
  attainment_model const model{constant(0.1), exponential(1.0), seconds{2.1}};
  EXPECT_NEAR(model.at(1.0).cold, 1.0 - std::exp(-2.0), 1e-3);
  EXPECT_EQ(model.at(1.0).idle, 1.0);
  attainment_model const hopeless{constant(0.1), constant(2.0), seconds{1.5}};
  EXPECT_EQ(hopeless.at(1.0).cold, 0.0);
}

TEST(attainment, without_arrivals_mixes_only_cold_and_idle) {
  attainment_model const model{constant(0.1), constant(2.0), seconds{1.5}};
  attainment_at_rate const at = model.at(0.0);
  EXPECT_NEAR(at.share_within(0.0), 1.0, 1e-12);
  EXPECT_NEAR(at.share_within(0.25), 0.75, 1e-12);
  EXPECT_NEAR(at.share_within(1.0), 0.0, 1e-12);
}

TEST(attainment, never_rises_with_the_chance_of_a_release) {
  std::array const distributions{constant(0.05), exponential(0.05),
                                 distribution::gamma(seconds{0.05}, 4.0)};
  std::array const loads{distribution{}, constant(0.4), exponential(0.2),
                         distribution::gamma(seconds{3.0}, 2.0)};
  for (distribution const& service : distributions) {
    for (distribution const& load : loads) {
      for (double const latency : {0.04, 0.2, 1.0, 10.0}) {
        attainment_model const model{service, load, seconds{latency}};
        for (double const rate : {0.0, 0.1, 3.0, 15.0, 19.9}) {
          attainment_at_rate const at = model.at(rate);
          double before = at.share_within(0.0);
          EXPECT_LE(before, 1.0 + 1e-12);
          for (double p = 0.1; p <= 1.0; p += 0.1) {
            double const now = at.share_within(p);
            EXPECT_LE(now, before + 1e-12) << latency << ' ' << rate << ' ' << p;
            EXPECT_GE(now, -1e-12);
            before = now;
          }
        }
      }
    }
  }
}

TEST(attainment, never_rises_with_the_arrival_rate_and_never_falls_with_the_latency) {
  double shorter = 0.0;
  for (double const latency : {0.1, 0.2, 0.5, 1.0, 3.0}) {
    attainment_model const model{exponential(0.05), constant(0.4), seconds{latency}};
    double before = 1.0;
    for (double rate = 0.0; rate < 25.0; rate += 1.0) {
      double const now = model.at(rate).share_within(0.3);
      EXPECT_LE(now, before + 1e-12);
      before = now;
    }
    double const now = model.at(4.0).share_within(0.3);
    EXPECT_GE(now, shorter);
    shorter = now;
  }
}

TEST(attainment, of_an_overloaded_queue_is_nothing) {
  attainment_model const model{constant(0.1), distribution{}, seconds{1.0}};
  EXPECT_EQ(model.at(10.0).share_within(0.0), 0.0);
  EXPECT_EQ(model.at(1000.0).share_within(1.0), 0.0);
}

TEST(attainment, survives_services_far_shorter_and_far_longer_than_the_latency) {
  attainment_model const quick{exponential(1e-5), constant(1e-3), seconds{100.0}};
  EXPECT_NEAR(quick.at(1000.0).share_within(1.0), 1.0, 1e-6);
  attainment_model const slow{exponential(1e5), constant(1e-3), seconds{1e-3}};
  EXPECT_NEAR(slow.at(1e-6).share_within(0.0), 0.0, 1e-6);
}

TEST(largest_warm_rate, is_where_the_share_is_just_met) {
  attainment_model const model{exponential(0.1), distribution{}, seconds{1.0}};
  // 1 − e^{−(10 − λ)} = 0.99 at λ = 10 − ln 100.
  EXPECT_NEAR(model.largest_warm_rate(0.99, 9.0), 10.0 - std::log(100.0), 0.02);
  EXPECT_EQ(model.largest_warm_rate(0.99, 2.0), 2.0);
  EXPECT_EQ(model.largest_warm_rate(0.99999, 9.0), 0.0);
  EXPECT_LT(model.largest_warm_rate(0.5, 1000.0), 10.0);
}

objective promise(double percentile, double attainment) {
  return {.percentile = percentile,
          .latency = seconds{1.0},
          .attainment = attainment,
          .window = seconds{100.0}};
}

TEST(required_share, leaves_room_for_the_noise_of_a_window) {
  // 300 requests, 3 may miss: Poisson of mean 0.8232 stays at or below 3 with probability 0.99.
  EXPECT_NEAR(required_share(promise(0.99, 0.99), 3.0), 1.0 - 0.8232 / 300.0, 1e-6);
  // No miss allowed at all in 100 requests, in 99 of 100 windows.
  EXPECT_NEAR(required_share(promise(1.0, 0.99), 1.0), 1.0 + std::log(0.99) / 100.0, 1e-9);
}

TEST(required_share, tends_to_the_percentile_for_many_requests_and_to_the_attainment_for_one) {
  EXPECT_NEAR(required_share(promise(0.95, 0.99), 1000.0), 0.95, 0.002);
  EXPECT_NEAR(required_share(promise(0.99, 0.9), 0.0), 0.9, 0.01);
}

TEST(required_share, never_falls_with_either_share_and_stays_reachable) {
  for (double const rate : {0.0, 0.01, 0.3, 2.0, 40.0, 1e9}) {
    for (double a = 0.1; a < 0.95; a += 0.1) {
      for (double p = 0.1; p < 0.95; p += 0.1) {
        double const share = required_share(promise(p, a), rate);
        EXPECT_GE(share, p * a - 1e-12);
        EXPECT_LT(share, 1.0);
        EXPECT_LE(share, required_share(promise(p + 0.05, a), rate) + 1e-12);
        EXPECT_LE(share, required_share(promise(p, a + 0.05), rate) + 1e-12);
      }
    }
  }
  EXPECT_LT(required_share(promise(0.99, 1.0), 1.0), 1.0);
}

TEST(objective, names_the_member_that_makes_no_sense) {
  auto const message = [](objective const& o) {
    try {
      o.check();
    } catch (std::invalid_argument const& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message(promise(0.99, 1.0)), "accepted");
  EXPECT_NE(message(promise(99.0, 0.99)).find("percentile is a share"), std::string::npos);
  EXPECT_NE(message(promise(0.99, 0.0)).find("attainment is a share"), std::string::npos);
  EXPECT_NE(message({.latency = seconds{0.0}}).find("latency must be"), std::string::npos);
  EXPECT_NE(message({.latency = seconds{1.0}, .window = forever}).find("window must be"),
            std::string::npos);
  EXPECT_THROW((attainment_model{distribution{}, distribution{}, seconds{-1.0}}),
               std::invalid_argument);
  EXPECT_THROW((void)(attainment_model{distribution{}, distribution{}, seconds{1.0}}.at(-1.0)),
               std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
