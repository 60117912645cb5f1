#include "scheduler/run_ahead.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

double us(seconds value) {
  return value.count() * 1e6;
}

double bound_us(run_ahead_promise const& promise) {
  return us(run_ahead_bound({&promise, 1}));
}

TEST(run_ahead_bound, is_a_twentieth_of_the_slack_over_the_promises_exponents) {
  EXPECT_NEAR(bound_us({.share = 0.99, .latency = 20ms, .service = 2ms}), 195.4, 0.1);
  EXPECT_NEAR(bound_us({.share = 0.999, .latency = 20ms, .service = 2ms}), 130.3, 0.1);
  EXPECT_NEAR(bound_us({.share = 0.9, .latency = 5ms, .service = 1ms}), 86.9, 0.1);
}

// What the formula is for: waits of an M/M/1 queue at the edge of their promise, made longer by B.
TEST(run_ahead_bound, makes_misses_more_by_a_twentieth_where_waits_are_exponential) {
  double const rate = 250.0;
  double const service = 0.002;
  double const busy = rate * service;
  double const decay = 1.0 / service - rate;
  double const latency = 0.018;  // of the wait alone
  double const misses = busy * std::exp(-decay * latency);
  auto const bound = run_ahead_bound(std::array{run_ahead_promise{
      .share = 1.0 - misses, .latency = seconds{latency + service}, .service = seconds{service}}});
  double const then = busy * std::exp(-decay * (latency - bound.count()));
  EXPECT_GT(then / misses, 1.0);
  EXPECT_LT(then / misses, 1.052);
}

TEST(run_ahead_bound, follows_the_tightest_promise) {
  std::array const both{run_ahead_promise{.latency = 500ms, .service = 5ms},
                        run_ahead_promise{.latency = 12ms, .service = 2ms}};
  EXPECT_EQ(run_ahead_bound(both), run_ahead_bound(std::span{both}.subspan(1)));
  EXPECT_NEAR(us(run_ahead_bound(both)), 108.6, 0.1);
}

TEST(run_ahead_bound, stays_between_starving_training_and_gaining_nothing) {
  EXPECT_EQ(run_ahead_bound({}), most_run_ahead);
  EXPECT_DOUBLE_EQ(bound_us({.latency = 1h}), 1000.0);
  EXPECT_DOUBLE_EQ(bound_us({.latency = 1us}), 30.0);
  EXPECT_DOUBLE_EQ(bound_us({.latency = 10ms, .service = 20ms}), 30.0) << "no slack at all";
  EXPECT_DOUBLE_EQ(bound_us({.share = 1.0, .latency = 1h}), 30.0) << "no miss to spare";
  EXPECT_DOUBLE_EQ(bound_us({.share = 0.0, .latency = 1us}), 1000.0) << "nothing is promised";
}

TEST(run_ahead_bound, never_grows_with_the_promise_or_the_service_time) {
  double before = 1e9;
  for (double share = 0.5; share <= 1.0; share += 0.001) {
    auto const now = bound_us({.share = share, .latency = 15ms, .service = 3ms});
    EXPECT_LE(now, before);
    before = now;
  }
  before = 1e9;
  for (auto service = 0us; service < 20ms; service += 100us) {
    auto const now = bound_us({.share = 0.99, .latency = 15ms, .service = service});
    EXPECT_LE(now, before);
    before = now;
  }
}

}  // namespace
}  // namespace sluice::scheduler
