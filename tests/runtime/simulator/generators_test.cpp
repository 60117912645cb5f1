#include "runtime/simulator/generators.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "tests/runtime/simulator/refusal.hpp"

namespace sluice::simulator {
namespace {

using testing::HasSubstr;

trace of(std::string const& description, double length_s = 20'000.0) {
  return generate(description, {.length_s = length_s, .seed = 3});
}

double rate(trace const& made) {
  return static_cast<double>(made.requests.size()) / made.length_s;
}

/// Variance of the numbers in windows over their mean.
double dispersion(trace const& made, double window_s) {
  std::vector<double> counts(static_cast<std::size_t>(made.length_s / window_s));
  for (auto const& each : made.requests) {
    auto const i = static_cast<std::size_t>(each.at_s / window_s);
    if (i < counts.size()) {
      counts[i] += 1.0;
    }
  }
  double mean = 0.0, square = 0.0;
  for (double const each : counts) {
    mean += each / static_cast<double>(counts.size());
    square += each * each / static_cast<double>(counts.size());
  }
  return (square - mean * mean) / mean;
}

TEST(a_poisson_process, has_its_rate_and_a_dispersion_of_one) {
  auto const made = of("poisson:rate=5");
  EXPECT_NEAR(rate(made), 5.0, 0.06);
  EXPECT_NEAR(dispersion(made, 10.0), 1.0, 0.12);
}

TEST(a_switching_process, has_the_mean_of_its_rates_and_the_dispersion_of_its_theory) {
  auto const made = of("mmpp:rates=18/2,switches=0.1/0.1", 200'000.0);
  EXPECT_NEAR(rate(made), 10.0, 0.3);
  EXPECT_NEAR(dispersion(made, 1000.0), 65.0, 20.0);  // asymptotically
}

TEST(a_switching_process, is_in_each_state_for_its_share_of_the_time) {
  EXPECT_NEAR(rate(of("mmpp:rates=10/0,switches=0.3/0.1", 100'000.0)), 2.5, 0.1);
}

TEST(a_periodic_process, brings_a_bunch_around_each_period) {
  auto const made = of("periodic:period=100,jitter=3,bunch=4,spread=10");
  EXPECT_NEAR(rate(made), 4.0 / 100.0, 0.001);
  double const phase = made.requests.front().at_s;
  for (auto const& each : made.requests) {
    double const from_first = std::remainder(each.at_s - phase - 5.0, 100.0) + 5.0;
    EXPECT_GE(from_first, -6.0);
    EXPECT_LE(from_first, 16.0);
  }
  EXPECT_TRUE(std::is_sorted(made.requests.begin(), made.requests.end(),
                             [](auto const& a, auto const& b) { return a.at_s < b.at_s; }));
}

TEST(a_periodic_process, leaves_bunches_out) {
  auto const made = of("periodic:period=10,bunch=2,missed=0.25");
  EXPECT_NEAR(rate(made), 0.15, 0.01);
}

TEST(a_periodic_process, has_a_phase_of_its_own_for_each_model) {
  auto const made =
      generate("periodic:period=50", {.length_s = 500.0, .models = 3, .seed = 3}).requests;
  std::vector<std::vector<double>> times(3);
  for (auto const& each : made) {
    times.at(each.model).push_back(each.at_s);
  }
  for (auto const& its : times) {
    ASSERT_EQ(its.size(), 10U);
    for (std::size_t i = 1; i < its.size(); ++i) {
      EXPECT_NEAR(its[i] - its[i - 1], 50.0, 1e-6);
    }
  }
  EXPECT_NE(times[0].front(), times[1].front());
  EXPECT_NE(times[1].front(), times[2].front());
}

TEST(a_periodic_process, is_refused_where_it_has_no_meaning) {
  auto const refusal = [](std::string const& text) { return refusal_of([&] { (void)of(text); }); };
  EXPECT_THAT(refusal("periodic:jitter=1"), HasSubstr("periodic needs period="));
  EXPECT_THAT(refusal("periodic:period=10,jitter=6,spread=4"),
              HasSubstr("must be below the period of 10 s"));
  EXPECT_THAT(refusal("periodic:period=10,bunch=1.5"), HasSubstr("a whole number from 1 on"));
  EXPECT_THAT(refusal("periodic:period=10,missed=1"), HasSubstr("must be below 1"));
  EXPECT_THAT(refusal("periodic:period=10,zipf=1"), HasSubstr("zipf of periodic"));
  EXPECT_THAT(refusal("periodic:period=10,rate=1"), HasSubstr("has no parameter 'rate'"));
}

// Hawkes: a branching ratio of n has an asymptotic dispersion of 1/(1 − n)².
TEST(a_hawkes_process, has_its_rate_and_the_dispersion_of_its_branching) {
  auto const made = of("hawkes:rate=5,branching=0.5,decay=2", 100'000.0);
  EXPECT_NEAR(rate(made), 5.0, 0.1);
  EXPECT_NEAR(dispersion(made, 50.0), 4.0, 0.5);
}

TEST(log_normal_gaps, have_their_mean_and_spread) {
  auto const made = of("lognormal:rate=2,scv=4", 200'000.0);
  EXPECT_NEAR(rate(made), 2.0, 0.03);
  EXPECT_NEAR(dispersion(made, 100.0), 4.0, 0.6);  // of a renewal process that is the gaps' scv
}

TEST(a_day, has_more_in_its_first_half) {
  auto const made = of("diurnal:rate=2,swing=0.8,period=1000");
  EXPECT_NEAR(rate(made), 2.0, 0.05);
  double const first = static_cast<double>(
      std::count_if(made.requests.begin(), made.requests.end(),
                    [](auto const& each) { return std::fmod(each.at_s, 1000.0) < 500.0; }));
  EXPECT_NEAR(first / static_cast<double>(made.requests.size()), 0.5 + 0.8 / 3.14159265,
              0.01);  // half, and swing/π of the mean
}

TEST(requests, go_to_models_by_zipf_if_they_are_told_to) {
  auto const counts = [](std::string const& description) {
    auto const made = generate(description, {.length_s = 2000.0, .models = 4, .seed = 1});
    EXPECT_EQ(made.models.size(), 4U);
    std::vector<double> shares(4);
    for (auto const& each : made.requests) {
      shares.at(each.model) += 1.0 / static_cast<double>(made.requests.size());
    }
    return shares;
  };
  EXPECT_NEAR(counts("poisson:rate=5")[0], 0.25, 0.02);
  EXPECT_NEAR(counts("poisson:rate=5,zipf=1")[0], 12.0 / 25.0, 0.02);
}

TEST(services, have_their_mean_and_spread) {
  for (double const scv : {0.0, 0.3, 1.0, 4.0}) {
    auto const made =
        generate("poisson:rate=10", {.length_s = 10'000.0, .service_s = 0.1, .service_scv = scv});
    double mean = 0.0, square = 0.0;
    for (auto const& each : made.requests) {
      mean += each.service_s;
      square += each.service_s * each.service_s;
    }
    auto const n = static_cast<double>(made.requests.size());
    mean /= n;
    EXPECT_NEAR(mean, 0.1, 0.003) << scv;
    EXPECT_NEAR(square / n / (mean * mean) - 1.0, scv, 0.03 + 0.06 * scv) << scv;
  }
}

TEST(a_description, makes_the_same_trace_for_the_same_seed) {
  auto const one = of("hawkes:rate=5,branching=0.5,decay=2", 100.0);
  auto const other = of("hawkes:rate=5,branching=0.5,decay=2", 100.0);
  ASSERT_EQ(one.requests.size(), other.requests.size());
  EXPECT_EQ(one.requests.back().at_s, other.requests.back().at_s);
}

TEST(a_description, is_told_from_a_files_name) {
  EXPECT_TRUE(names_process("poisson:rate=2"));
  EXPECT_FALSE(names_process("poisson"));
  EXPECT_FALSE(names_process("folder/poisson.csv"));
  EXPECT_FALSE(names_process("c:trace.csv"));
}

TEST(a_description, that_cannot_be_understood_is_refused_with_what_would_be_right) {
  auto const refusal = [](std::string const& description) {
    return refusal_of([&] { (void)of(description, 10.0); });
  };
  EXPECT_THAT(refusal("uniform:rate=2"), HasSubstr("there is no process 'uniform'; there are"));
  EXPECT_THAT(refusal("poisson:"), HasSubstr("poisson needs rate= with a number"));
  EXPECT_THAT(refusal("poisson:rate=fast"), HasSubstr("'fast' in 'rate=fast' of poisson"));
  EXPECT_THAT(refusal("poisson:rate=-1"), HasSubstr("rate of poisson is -1, must be from"));
  EXPECT_THAT(refusal("poisson:rate=2,scv=1"), HasSubstr("poisson has no parameter 'scv'"));
  EXPECT_THAT(refusal("poisson:rate=2,rate=3"), HasSubstr("is there twice"));
  EXPECT_THAT(refusal("poisson:2"), HasSubstr("must be a name and a number"));
  EXPECT_THAT(refusal("mmpp:rates=18,switches=1/1"), HasSubstr("two numbers, such as 18/2"));
  EXPECT_THAT(refusal("hawkes:rate=1,branching=1,decay=1"), HasSubstr("branching of hawkes is 1"));
  EXPECT_THAT(refusal("poisson:rate=1e-9"), HasSubstr("brings no request"));
}

TEST(switching_of, knows_the_two_rates_of_streams_that_have_them) {
  EXPECT_EQ(switching_of("mmpp:rates=18/2,switches=0.1/0.2")->switches_per_s[1], 0.2);
  EXPECT_EQ(switching_of("poisson:rate=3")->mean_rate_per_s(), 3.0);
  EXPECT_FALSE(switching_of("diurnal:rate=2,swing=0.8,period=1000"));
}

}  // namespace
}  // namespace sluice::simulator
