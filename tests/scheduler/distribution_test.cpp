#include "scheduler/distribution.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

distribution const two_kinds =
    distribution::mixture({{.weight = 9.0, .mean = seconds{0.02}, .scv = 1.0},
                           {.weight = 1.0, .mean = seconds{0.2}, .scv = 0.0}});

double square_excess(distribution const& of, double x) {
  return of.excesses(seconds{x}, 2)[x > 0.0 ? 1 : 0].square;
}

TEST(distribution, keeps_the_moments_of_its_parts) {
  EXPECT_DOUBLE_EQ(two_kinds.mean().count(), 0.038);
  EXPECT_DOUBLE_EQ(two_kinds.second_moment_s2(), 0.9 * 2 * 0.0004 + 0.1 * 0.04);
  EXPECT_NEAR(distribution::gamma(seconds{3.0}, 0.25).scv(), 0.25, 1e-14);
  EXPECT_EQ(distribution{}.mean().count(), 0.0);
  EXPECT_EQ(distribution{}.scv(), 0.0);
}

TEST(distribution, exponential_has_its_closed_forms) {
  distribution const b = distribution::gamma(seconds{0.1}, 1.0);
  for (double const x : {0.0, 0.03, 0.1, 0.5}) {
    double const tail = std::exp(-x / 0.1);
    EXPECT_NEAR(b.cdf(seconds{x}), 1.0 - tail, 1e-13);
    EXPECT_NEAR(b.mean_excess(seconds{x}).count(), 0.1 * tail, 1e-13);
    EXPECT_NEAR(square_excess(b, x), 2.0 * 0.01 * tail, 1e-13);
  }
  EXPECT_NEAR(b.mgf(4.0), 1.0 / (1.0 - 0.4), 1e-13);
  EXPECT_NEAR(b.mgf_slope(4.0), 0.1 / (0.6 * 0.6), 1e-13);
  EXPECT_EQ(b.mgf(10.0), std::numeric_limits<double>::infinity());
  EXPECT_DOUBLE_EQ(b.mgf_limit_per_s(), 10.0);
}

TEST(distribution, excesses_are_integrals_of_the_tail) {
  distribution const l = distribution::mixture({{.weight = 0.3, .mean = seconds{1.0}, .scv = 0.4},
                                                {.weight = 0.5, .mean = seconds{0.2}, .scv = 3.0},
                                                {.weight = 0.2, .mean = seconds{0.7}}});
  // Midpoint sums of P(X > u) and of 2(u − x)P(X > u) over (x, 40).
  double const x = 0.3;
  double const h = 1e-3;
  double mean = 0.0;
  double square = 0.0;
  for (double u = x + h / 2; u < 40.0; u += h) {
    double const tail = 1.0 - l.cdf(seconds{u});
    mean += h * tail;
    square += h * 2.0 * (u - x) * tail;
  }
  EXPECT_NEAR(l.mean_excess(seconds{x}).count(), mean, 1e-4);
  EXPECT_NEAR(square_excess(l, x), square, 1e-4);
}

TEST(distribution, of_samples_is_their_empirical_distribution) {
  std::array const samples{0.1, 0.2, 0.2, 0.5};
  distribution const l = distribution::of_samples(samples);
  EXPECT_DOUBLE_EQ(l.mean().count(), 0.25);
  EXPECT_DOUBLE_EQ(l.cdf(seconds{0.2}), 0.75);
  EXPECT_DOUBLE_EQ(l.cdf(seconds{0.19}), 0.25);
  EXPECT_DOUBLE_EQ(l.mean_excess(seconds{0.2}).count(), 0.075);
  EXPECT_NEAR(l.mgf(2.0), (std::exp(0.2) + 2 * std::exp(0.4) + std::exp(1.0)) / 4, 1e-13);
  EXPECT_EQ(l.mgf_limit_per_s(), std::numeric_limits<double>::infinity());
}

TEST(distribution, nearly_constant_counts_as_constant) {
  distribution const l = distribution::gamma(seconds{2.0}, 1e-6);
  EXPECT_EQ(l.cdf(seconds{1.999}), 0.0);
  EXPECT_EQ(l.cdf(seconds{2.0}), 1.0);
  EXPECT_EQ(l.scv(), 0.0);
}

TEST(distribution, refuses_what_is_no_distribution) {
  std::array const negative{0.1, -0.1};
  std::array const infinite{forever.count()};
  EXPECT_THROW((void)distribution::gamma(seconds{-1.0}, 1.0), std::invalid_argument);
  EXPECT_THROW((void)distribution::gamma(seconds{1.0}, std::nan("")), std::invalid_argument);
  EXPECT_THROW((void)distribution::mixture({}), std::invalid_argument);
  EXPECT_THROW((void)distribution::mixture({{.weight = 0.0, .mean = seconds{1.0}}}),
               std::invalid_argument);
  EXPECT_THROW((void)distribution::of_samples(negative), std::invalid_argument);
  EXPECT_THROW((void)distribution::of_samples(infinite), std::invalid_argument);
}

TEST(distribution, says_its_excesses_in_one_go_as_one_by_one) {
  std::array const samples{0.2, 0.0, 0.5, 1.3, 0.2};
  for (auto const& l : {two_kinds, distribution::of_samples(samples), distribution{}}) {
    auto const all = l.excesses(seconds{0.1}, 20);
    ASSERT_EQ(all.size(), 20U);
    for (std::size_t i = 0; i < all.size(); ++i) {
      seconds const x{0.1 * static_cast<double>(i)};
      EXPECT_DOUBLE_EQ(1.0 - all[i].probability, l.cdf(x));
      EXPECT_DOUBLE_EQ(all[i].mean, l.mean_excess(x).count());
      EXPECT_DOUBLE_EQ(all[i].square, square_excess(l, x.count()));
    }
  }
}

TEST(distribution, condensed_is_nearly_the_same_of_far_fewer_parts) {
  std::vector<distribution::part> parts;
  for (int i = 0; i < 5000; ++i) {  // exponential by its quantiles, and a tail of ten times as much
    double const share = (i + 0.5) / 5000.0;
    parts.push_back({.weight = 1.0, .mean = seconds{-0.1 * std::log(1.0 - share)}});
    parts.push_back({.weight = 0.05, .mean = seconds{1.0 + share}, .scv = 1.0});
  }
  auto const all = distribution::mixture(parts);
  auto const few = all.condensed(512);
  EXPECT_NEAR(few.mean().count(), all.mean().count(), 1e-9);
  EXPECT_NEAR(few.second_moment_s2(), all.second_moment_s2(), 1e-9);
  for (double const x : {0.01, 0.05, 0.1, 0.3, 1.0, 3.0}) {
    EXPECT_NEAR(few.cdf(seconds{x}), all.cdf(seconds{x}), 0.01) << x;
    EXPECT_NEAR(few.mean_excess(seconds{x}).count(), all.mean_excess(seconds{x}).count(), 1e-3)
        << x;
  }
}

TEST(distribution, of_constants_has_nearly_the_same_tails) {
  auto const curved = distribution::mixture({{.weight = 1.0, .mean = seconds{0.1}, .scv = 1.0},
                                             {.weight = 0.2, .mean = seconds{0.5}, .scv = 4.0},
                                             {.weight = 0.3, .mean = seconds{0.2}}});
  auto const straight = curved.of_constants(64);
  EXPECT_NEAR(straight.mean().count(), curved.mean().count(), 1e-6);
  EXPECT_NEAR(straight.second_moment_s2(), curved.second_moment_s2(), 1e-6);
  for (double const x : {0.003, 0.05, 0.15, 0.3, 1.0, 3.0}) {
    EXPECT_NEAR(straight.cdf(seconds{x}), curved.cdf(seconds{x}), 0.02) << x;
    EXPECT_NEAR(straight.mean_excess(seconds{x}).count(), curved.mean_excess(seconds{x}).count(),
                4e-3)
        << x;
  }
  auto const constant = distribution::mixture({{.weight = 1.0, .mean = seconds{0.2}}});
  EXPECT_EQ(constant.of_constants(8).cdf(seconds{0.19}), 0.0);
}

TEST(distribution, condensed_keeps_what_is_small_and_constants) {
  auto const two = distribution::mixture(
      {{.weight = 1.0, .mean = seconds{1.0}}, {.weight = 2.0, .mean = seconds{3.0}}});
  EXPECT_EQ(two.condensed(2).cdf(seconds{2.0}), two.cdf(seconds{2.0}));
  std::vector<double> const same(1000, 0.25);
  auto const constant = distribution::of_samples(same).condensed(8);
  EXPECT_EQ(constant.cdf(seconds{0.249}), 0.0);
  EXPECT_NEAR(constant.cdf(seconds{0.251}), 1.0, 1e-12);
  std::vector<double> rare(1000, 0.0);
  rare.back() = 5.0;
  auto const mostly_nothing = distribution::of_samples(rare).condensed(8);
  EXPECT_NEAR(mostly_nothing.mean().count(), 0.005, 1e-12);
  EXPECT_NEAR(mostly_nothing.second_moment_s2(), 0.025, 1e-12);
}

}  // namespace
}  // namespace sluice::scheduler
