#include "scheduler/shared_server.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

distribution exponential(double mean) {
  return distribution::gamma(seconds{mean}, 1.0);
}

std::vector<request_class> const two_kinds{
    {.arrivals_per_s = 4.5, .service = distribution::gamma(seconds{0.05}, 0.0)},
    {.arrivals_per_s = 0.5, .service = distribution::gamma(seconds{0.5}, 0.0)}};

TEST(several_classes_in_turn, wait_as_for_the_mixture_of_their_services) {
  // The same requests as one class whose services are of two kinds.
  EXPECT_NEAR(mean_wait_in_turn(two_kinds).count(), 0.129762, 5e-7);
  auto const all = all_of(two_kinds);
  EXPECT_DOUBLE_EQ(all.arrivals_per_s, 5.0);
  EXPECT_NEAR(all.utilisation(), 0.475, 1e-12);
}

TEST(several_classes_in_turn, are_mixed_whatever_their_distributions_are_made_of) {
  double const samples[] = {0.01, 0.02, 0.03};
  std::vector<request_class> const kinds{
      {.arrivals_per_s = 2.0, .service = distribution::of_samples(samples)},
      {.arrivals_per_s = 1.0, .service = exponential(0.1)},
      {.arrivals_per_s = 1.0, .service = distribution{}},
      {.arrivals_per_s = 0.0, .service = exponential(1e6)}};
  auto const all = all_of(kinds);
  EXPECT_NEAR(all.service.mean().count(), (2.0 * 0.02 + 0.1) / 4.0, 1e-12);
  EXPECT_NEAR(all.service.second_moment_s2(), (2.0 * 14e-4 / 3.0 + 0.02) / 4.0, 1e-12);
}

// Cobham: W₀/((1 − σ_before)(1 − σ_with)), and what is lost for one is gained by the other (conservation).
TEST(several_classes_by_rank, wait_by_those_before_them) {
  auto const waits = mean_waits_by_rank(two_kinds);
  double const residual = 0.5 * (4.5 * 0.0025 + 0.5 * 0.25);
  EXPECT_NEAR(waits[0].count(), residual / (1.0 - 0.225), 1e-12);
  EXPECT_NEAR(waits[1].count(), residual / ((1.0 - 0.225) * (1.0 - 0.475)), 1e-12);
  EXPECT_NEAR(0.225 * waits[0].count() + 0.25 * waits[1].count(), 0.475 * 0.129762, 5e-7);
}

TEST(several_classes_by_rank, wait_forever_from_the_one_that_fills_the_server) {
  std::vector<request_class> const kinds{{.arrivals_per_s = 5.0, .service = exponential(0.1)},
                                         {.arrivals_per_s = 6.0, .service = exponential(0.1)}};
  auto const waits = mean_waits_by_rank(kinds);
  EXPECT_TRUE(std::isfinite(waits[0].count()));
  EXPECT_EQ(waits[1], forever);
  EXPECT_EQ(mean_wait_in_turn(kinds), forever);
}

// Erlang's formula for waiting: P(wait) of 3 servers at 2 erlangs is 4/9, and the mean wait then 4/9 of a service.
TEST(concurrent_server, without_slow_downs_is_mmc) {
  auto const three =
      waits_of({.arrivals_per_s = 2.0, .service = seconds{1.0}, .slowdown = {1.0, 1.0, 1.0}});
  EXPECT_NEAR(three.all_busy, 4.0 / 9.0, 1e-12);
  EXPECT_NEAR(three.mean_wait.count(), 4.0 / 9.0, 1e-12);
  EXPECT_NEAR(three.mean_response.count(), 13.0 / 9.0, 1e-12);
  EXPECT_NEAR(three.decay_per_s, 1.0, 1e-12);
  auto const one = waits_of({.arrivals_per_s = 8.0, .service = seconds{0.1}});
  EXPECT_NEAR(one.mean_wait.count(), 0.4, 1e-12);
  EXPECT_NEAR(one.mean_response.count(), 0.5, 1e-12);
  auto const many = waits_of({.arrivals_per_s = 1900.0,
                              .service = seconds{1.0},
                              .slowdown = std::vector<double>(2000, 1.0)});
  EXPECT_NEAR(many.all_busy, 0.013406, 5e-6);
}

TEST(concurrent_server, that_only_shares_one_servers_work_answers_as_fast_on_average) {
  // n at once, each n times as long: the number in the system is that of M/M/1, whoever is computed.
  auto const shared =
      waits_of({.arrivals_per_s = 8.0, .service = seconds{0.1}, .slowdown = {1.0, 2.0, 3.0, 4.0}});
  EXPECT_NEAR(shared.mean_response.count(), 0.5, 1e-12);
  EXPECT_LT(shared.mean_wait.count(), 0.4);
}

TEST(concurrent_server, with_half_the_gain_lies_between) {
  auto const response = [](std::vector<double> slowdown) {
    return waits_of({.arrivals_per_s = 8.0, .service = seconds{0.1}, .slowdown = slowdown})
        .mean_response;
  };
  EXPECT_LT(response({1.0, 1.5}), response({1.0, 2.0}));
  EXPECT_GT(response({1.0, 1.5}), response({1.0, 1.0}));
}

TEST(concurrent_server, that_is_idle_or_full_has_the_limits) {
  auto const idle = waits_of({.arrivals_per_s = 0.0, .service = seconds{0.1}});
  EXPECT_EQ(idle.mean_wait.count(), 0.0);
  EXPECT_DOUBLE_EQ(idle.mean_response.count(), 0.1);
  auto const full =
      waits_of({.arrivals_per_s = 20.0, .service = seconds{0.1}, .slowdown = {1.0, 1.0}});
  EXPECT_EQ(full.mean_response, forever);
}

TEST(shared_servers, refuse_numbers_without_meaning) {
  EXPECT_THROW((void)all_of(std::vector<request_class>{{.arrivals_per_s = -1.0}}),
               std::invalid_argument);
  EXPECT_THROW((void)waits_of({.arrivals_per_s = 1.0, .service = seconds{0.0}}),
               std::invalid_argument);
  EXPECT_THROW((void)waits_of({.arrivals_per_s = 1.0, .service = seconds{1.0}, .slowdown = {}}),
               std::invalid_argument);
  EXPECT_THROW((void)waits_of({.arrivals_per_s = 1.0, .service = seconds{1.0}, .slowdown = {0.0}}),
               std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
