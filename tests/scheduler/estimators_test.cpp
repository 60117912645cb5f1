#include "scheduler/estimators.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

instant at(double s) {
  return instant{seconds{s}};
}

/// Gaps of a Poisson stream by inversion, the same on every platform.
class poisson_gaps {
 public:
  explicit poisson_gaps(double rate) : rate_(rate) {}
  double next() { return -std::log((static_cast<double>(random_()) + 0.5) / 4294967296.0) / rate_; }

 private:
  std::mt19937 random_{7};
  double rate_;
};

TEST(instant, takes_a_steady_clock_without_a_cast) {
  decayed_rate rate{10s, std::chrono::steady_clock::time_point{}};
  rate.count(std::chrono::steady_clock::time_point{} + 1500ms);
  EXPECT_GT(rate.per_second(std::chrono::steady_clock::time_point{} + 2s), 0.0);
}

TEST(decayed_rate, finds_the_rate_of_a_regular_stream_at_once) {
  decayed_rate rate{60s, at(100.0)};
  for (int i = 1; i <= 50; ++i) {
    rate.count(at(100.0 + 0.2 * i));
  }
  EXPECT_NEAR(rate.per_second(at(110.0)), 5.0, 0.1);  // a sixth of the time constant has passed
}

TEST(decayed_rate, decays_while_nothing_comes) {
  decayed_rate rate{10s, at(0.0)};
  for (int i = 1; i <= 1000; ++i) {
    rate.count(at(0.1 * i));
  }
  double const then = rate.per_second(at(100.0));
  EXPECT_NEAR(then, 10.0, 0.1);
  EXPECT_NEAR(rate.per_second(at(120.0)) / then, std::exp(-2.0), 1e-3);
}

TEST(decayed_rate, varies_as_theory_says) {
  poisson_gaps gaps{1.0};
  decayed_rate rate{60s, at(0.0)};
  double now = 0.0;
  double sum = 0.0;
  double square_sum = 0.0;
  int const rounds = 20000;
  double next_read = 1000.0;
  double next_arrival = gaps.next();
  for (int i = 0; i < rounds; ++i) {
    next_read += 30.0;
    for (; next_arrival < next_read; next_arrival += gaps.next()) {
      rate.count(at(next_arrival));
    }
    now = next_read;
    double const r = rate.per_second(at(now));
    sum += r;
    square_sum += r * r;
  }
  double const mean = sum / rounds;
  EXPECT_NEAR(mean, 1.0, 0.01);
  EXPECT_NEAR(std::sqrt(square_sum / rounds - mean * mean), 1.0 / std::sqrt(2.0 * 60.0),
              0.005);  // 9.1 %
}

TEST(decayed_rate, takes_a_late_event_as_simultaneous) {
  decayed_rate in_order{10s, at(0.0)};
  decayed_rate late{10s, at(0.0)};
  for (double const t : {1.0, 5.0, 5.0}) {
    in_order.count(at(t));
  }
  for (double const t : {1.0, 5.0, 4.0}) {
    late.count(at(t));
  }
  EXPECT_DOUBLE_EQ(late.per_second(at(6.0)), in_order.per_second(at(6.0)));
  EXPECT_DOUBLE_EQ(late.per_second(at(3.0)), in_order.per_second(at(3.0)));
}

TEST(decayed_rate, does_not_panic_over_one_early_event) {
  decayed_rate rate{10s, at(0.0)};
  rate.count(at(1e-6));
  EXPECT_LE(rate.per_second(at(1e-6)), 1.0);
  EXPECT_THROW((decayed_rate{0s, at(0.0)}), std::invalid_argument);
}

TEST(arrival_rates, plan_for_the_fast_estimate_only_when_traffic_really_rises) {
  arrival_rates rates{at(0.0)};
  double now = 0.0;
  for (; now < 600.0; now += 1.0) {
    rates.count(at(now));
  }
  EXPECT_DOUBLE_EQ(rates.planned(at(now)), rates.slow(at(now)));
  for (; now < 610.0; now += 0.05) {
    rates.count(at(now));
  }
  EXPECT_GT(rates.fast(at(now)), 10.0);
  EXPECT_LT(rates.slow(at(now)), 4.0);
  EXPECT_DOUBLE_EQ(rates.planned(at(now)), rates.fast(at(now)));
}

TEST(gap_histogram, knows_the_mean_rate_of_what_it_has_seen) {
  gap_histogram gaps;
  for (int i = 0; i < 29; ++i) {
    gaps.add(seconds{2.0});
  }
  EXPECT_FALSE(gaps.mean_rate_per_s()) << "a few gaps are no mean";
  for (int i = 0; i < 5000; ++i) {
    gaps.add(seconds{i % 2 == 0 ? 1.0 : 3.0});
  }
  EXPECT_NEAR(gaps.mean_rate_per_s().value_or(0.0), 0.5, 0.001);
}

TEST(gap_histogram, is_poisson_before_it_has_seen_anything) {
  gap_histogram const gaps;
  for (double const t : {0.0, 0.5, 3.0}) {
    EXPECT_DOUBLE_EQ(gaps.beyond(seconds{t}, 0.5).exceed, std::exp(-0.5 * t));
    EXPECT_DOUBLE_EQ(gaps.beyond(seconds{t}, 0.5).time_share, std::exp(-0.5 * t));
  }
  EXPECT_EQ(gaps.beyond(forever, 0.5).exceed, 0.0);
  EXPECT_EQ(gaps.beyond(forever, 0.0).exceed, 0.0);
  EXPECT_EQ(gaps.beyond(10s, 0.0).exceed, 1.0);
  EXPECT_EQ(gaps.beyond(10s, 0.0).time_share, 1.0);
}

TEST(gap_histogram, finds_the_survival_of_a_poisson_stream) {
  gap_histogram gaps;
  poisson_gaps stream{2.0};
  for (int i = 0; i < 5000; ++i) {
    gaps.add(seconds{stream.next()});
  }
  EXPECT_NEAR(gaps.weight(), 1000.0, 10.0);
  for (double const t : {0.05, 0.2, 0.5, 1.0}) {
    EXPECT_NEAR(gaps.beyond(seconds{t}, 2.0).exceed, std::exp(-2.0 * t), 0.05) << t;
    EXPECT_NEAR(gaps.beyond(seconds{t}, 2.0).time_share, std::exp(-2.0 * t), 0.06) << t;
  }
}

TEST(gap_histogram, sees_the_long_gaps_of_a_bursty_stream_that_poisson_denies) {
  gap_histogram gaps;  // 99 gaps of 50 ms, then one of 20 s: 4 per second on average
  for (int i = 1; i <= 3000; ++i) {
    gaps.add(i % 100 == 0 ? seconds{20.0} : seconds{0.05});
  }
  double const rate = 100.0 / (99 * 0.05 + 20.0);
  EXPECT_LT(std::exp(-rate * 5.0), 1e-8);
  EXPECT_NEAR(gaps.beyond(5s, rate).exceed, 0.01, 0.002);
  // Released 15 of every 25 seconds.
  EXPECT_NEAR(gaps.beyond(5s, rate).time_share, 15.0 / 24.95, 0.03);
}

TEST(gap_histogram, never_rises_with_the_timeout) {
  gap_histogram gaps;
  poisson_gaps stream{0.3};
  for (int i = 0; i < 400; ++i) {
    gaps.add(seconds{i % 5 == 0 ? stream.next() * 40.0 : stream.next() * 0.01});
  }
  gaps.add(seconds{0.0});
  gaps.add(seconds{1e9});
  auto before = gaps.beyond(0s, 0.3);
  for (double t = 1e-4; t < 1e6; t *= 1.07) {
    auto const now = gaps.beyond(seconds{t}, 0.3);
    EXPECT_LE(now.exceed, before.exceed + 1e-12) << t;
    EXPECT_LE(now.time_share, before.time_share + 1e-12) << t;
    before = now;
  }
}

TEST(gap_histogram, forgets_an_old_habit) {
  gap_histogram gaps;
  for (int i = 0; i < 1000; ++i) {
    gaps.add(100s);
  }
  EXPECT_GT(gaps.beyond(10s, 1.0).exceed, 0.9);
  for (int i = 0; i < 3000; ++i) {
    gaps.add(100ms);
  }
  EXPECT_LT(gaps.beyond(10s, 1.0).exceed, 0.06);
  EXPECT_THROW(gaps.add(-1s), std::invalid_argument);
}

TEST(gap_histogram, counts_on_after_a_million_gaps) {
  gap_histogram gaps;
  for (int i = 0; i < 1'000'000; ++i) {
    gaps.add(i % 2 == 0 ? 1s : 3s);
  }
  EXPECT_NEAR(gaps.weight(), 1001.0, 2.0);
  EXPECT_NEAR(gaps.beyond(2s, 0.5).exceed, (500.0 + 30.0 * std::exp(-1.0)) / 1030.0, 0.01);
}

TEST(dispersion_index, is_one_for_poisson_and_needs_thirty_windows) {
  dispersion_index index{1s, at(0.0)};
  poisson_gaps stream{5.0};
  double now = stream.next();
  for (; now < 29.0; now += stream.next()) {
    index.count(at(now));
  }
  EXPECT_FALSE(index.value(at(29.5)).has_value());
  for (; now < 2000.0; now += stream.next()) {
    index.count(at(now));
  }
  ASSERT_TRUE(index.value(at(2000.0)).has_value());
  EXPECT_NEAR(*index.value(at(2000.0)), 1.0, 0.3);
}

TEST(dispersion_index, is_zero_for_a_clockwork_and_large_for_bursts) {
  dispersion_index clockwork{1s, at(0.0)};
  dispersion_index bursts{1s, at(0.0)};
  for (int i = 0; i < 100; ++i) {
    for (int j = 0; j < 10; ++j) {
      clockwork.count(at(i + 0.05 + 0.1 * j));
      if (i % 5 == 0) {
        bursts.count(at(i + 0.05 + 0.1 * j));
      }
    }
  }
  EXPECT_NEAR(*clockwork.value(at(100.0)), 0.0, 1e-9);
  // Counts 10, 0, 0, 0, 0: mean 2, variance 16.
  EXPECT_NEAR(*bursts.value(at(100.0)), 8.0, 0.6);
}

TEST(dispersion_index, counts_a_long_silence_as_empty_windows) {
  dispersion_index one_by_one{1s, at(0.0)};
  dispersion_index at_once{1s, at(0.0)};
  one_by_one.count(at(0.5));
  at_once.count(at(0.5));
  for (int i = 1; i <= 400; ++i) {
    (void)one_by_one.value(at(i));
  }
  EXPECT_NEAR(*one_by_one.value(at(400.5)), *at_once.value(at(400.5)), 1e-9);
  EXPECT_FALSE(at_once.value(at(1e7)).has_value());  // all forgotten
}

TEST(dispersion_index, can_be_recalled_after_a_clock_has_leapt) {
  dispersion_index leapt{1s, at(0.0)};
  leapt.count(at(1e300));
  dispersion_index next{1s, at(0.0)};
  EXPECT_NO_THROW(next.recall(leapt.kept(at(1.1e300)), 1s, at(0.0)));
  EXPECT_FALSE(next.value(at(1.0)).has_value());
}

TEST(duration_window, starts_with_its_prior_and_ends_with_its_samples) {
  duration_window window{{.mean = 1s, .scv = 0.5}};
  EXPECT_DOUBLE_EQ(window.estimate().mean().count(), 1.0);
  EXPECT_NEAR(window.estimate().scv(), 0.5, 1e-12);
  for (int i = 0; i < 27; ++i) {
    window.add(100ms);
  }
  EXPECT_FALSE(window.measured());
  EXPECT_NEAR(window.estimate().mean().count(), (3.0 + 2.7) / 30.0, 1e-12);
  EXPECT_NEAR(window.estimate().scv(), 0.5, 1e-12);
  for (int i = 0; i < 3; ++i) {
    window.add(100ms);
  }
  EXPECT_TRUE(window.measured());
  EXPECT_NEAR(window.estimate().mean().count(), 0.1, 1e-12);
  EXPECT_NEAR(window.estimate().scv(), 0.0, 1e-9);
}

TEST(duration_window, keeps_only_the_last_samples) {
  duration_window window{{.mean = 1s}};
  for (int i = 0; i < 1000; ++i) {
    window.add(seconds{5.0});
  }
  for (std::size_t i = 0; i < duration_window::capacity; ++i) {
    window.add(seconds{0.25});
  }
  EXPECT_DOUBLE_EQ(window.estimate().mean().count(), 0.25);
  EXPECT_EQ(window.count(), 1000 + duration_window::capacity);
}

TEST(duration_window, refuses_what_is_no_duration) {
  duration_window window{{.mean = 1s}};
  EXPECT_THROW(window.add(-1ms), std::invalid_argument);
  EXPECT_THROW(window.add(seconds{std::nan("")}), std::invalid_argument);
  EXPECT_EQ(window.count(), 0U);
  EXPECT_THROW((duration_window{{.mean = -1s}}), std::invalid_argument);
  EXPECT_THROW((duration_window{{.mean = 1s, .scv = -1.0}}), std::invalid_argument);
}

TEST(attainment_window, forgets_what_has_left_the_window) {
  attainment_window window{60s, at(0.0)};
  EXPECT_FALSE(window.read(at(0.0)).share().has_value());
  for (int i = 0; i < 60; ++i) {
    window.add(at(i + 0.5), i >= 30);
  }
  EXPECT_DOUBLE_EQ(*window.read(at(59.9)).share(), 0.5);
  EXPECT_EQ(window.read(at(89.9)).requests, 30U);
  EXPECT_DOUBLE_EQ(*window.read(at(89.9)).share(), 1.0);
  EXPECT_FALSE(window.read(at(130.0)).share().has_value());
  window.add(at(1e6), false);
  EXPECT_EQ(window.read(at(1e6)).requests, 1U);
  EXPECT_DOUBLE_EQ(*window.read(at(1e6)).share(), 0.0);
}

TEST(attainment_window, counts_a_late_report_as_of_now) {
  attainment_window window{60s, at(0.0)};
  window.add(at(100.0), true);
  window.add(at(3.0), false);
  EXPECT_EQ(window.read(at(100.0)).requests, 2U);
  EXPECT_EQ(window.read(at(3.0)).within, 1U);
}

TEST(copy_time, is_what_a_load_takes_more_for_each_share_that_is_copied) {
  copy_time seen;
  EXPECT_FALSE(seen.of_all());
  seen.add(1.0, seconds{0.5});
  EXPECT_DOUBLE_EQ(seen.of_all()->count(), 0.5)
      << "nothing is known of a part that is always there";
  seen.add(0.5, seconds{0.4});
  EXPECT_NEAR(seen.of_all()->count(), 0.2, 1e-9);
  for (int i = 0; i < 1000; ++i) {
    seen.add(0.25, seconds{0.35});
  }
  EXPECT_NEAR(seen.of_all()->count(), 0.2, 1e-6);
}

TEST(copy_time, is_none_where_a_load_takes_as_long_whatever_it_copies) {
  copy_time seen;
  for (double const share : {1.0, 0.5, 0.1}) {
    seen.add(share, seconds{0.3});
  }
  EXPECT_NEAR(seen.of_all()->count(), 0.0, 1e-9);
  seen.add(0.01, seconds{5.0});
  EXPECT_EQ(seen.of_all()->count(), 0.0) << "never less";
}

TEST(copy_time, stays_a_number_whatever_it_is_told) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  copy_time seen;
  for (double const share : {-1.0, 0.0, 1e-300, 7.0, infinite}) {
    for (double const time : {-1.0, 0.0, 1e300, infinite}) {
      seen.add(share, seconds{time});
      auto const found = seen.of_all();
      EXPECT_TRUE(!found || (found->count() >= 0.0 && std::isfinite(found->count())));
    }
  }
}

}  // namespace
}  // namespace sluice::scheduler
