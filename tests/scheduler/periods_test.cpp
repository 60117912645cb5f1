#include "scheduler/periods.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace sluice::scheduler {
namespace {

instant at(double s) {
  return instant{seconds{s}};
}

/// The same on every platform.
class numbers {
 public:
  explicit numbers(std::uint32_t seed) : random_(seed) {}
  double uniform() { return (static_cast<double>(random_()) + 0.5) / 4294967296.0; }
  double gap(double mean) { return -mean * std::log(uniform()); }

 private:
  std::mt19937 random_;
};

struct timer {
  double period = 300.0;
  double jitter = 0.0;  ///< in seconds, either way
  double bunch = 1.0;
  double spread = 0.0;
  double missed = 0.0;
  double extra = 0.0;  ///< of periods, share with a request at some other time
  std::uint32_t seed = 1;

  std::vector<double> times(int periods, double from = 1000.0) const {
    numbers random{seed};
    std::vector<double> result;
    for (int i = 0; i < periods; ++i) {
      double const begin = from + i * period + jitter * (2.0 * random.uniform() - 1.0);
      bool const comes = random.uniform() >= missed;
      for (double k = 0.0; comes && k < bunch; k += 1.0) {
        result.push_back(begin + (k > 0.0 ? spread * random.uniform() : 0.0));
      }
      if (random.uniform() < extra) {
        result.push_back(begin + (0.2 + 0.6 * random.uniform()) * period);
      }
    }
    std::sort(result.begin(), result.end());
    return result;
  }
};

period_estimator told(std::vector<double> const& times) {
  period_estimator made;
  for (double const each : times) {
    made.count(at(each));
  }
  return made;
}

/// Of requests that do not come by a timer: in how many of so many instants a period is seen.
double share_of_time_with_a_period(std::vector<double> const& times) {
  period_estimator seen;
  double with = 0.0;
  for (double const each : times) {
    seen.count(at(each));
    with += seen.found(at(each)) ? 1.0 : 0.0;
  }
  return with / static_cast<double>(times.size());
}

TEST(a_period, is_found_after_eight_regular_requests) {
  timer const every{.period = 300.0, .jitter = 0.5};
  EXPECT_FALSE(told(every.times(7)).found(at(1000.0 + 6 * 300.0 + 1.0)));
  double const then = 1000.0 + 7 * 300.0 + 1.0;
  auto const seen = told(every.times(8));
  auto const found = seen.found(at(then));
  ASSERT_TRUE(found);
  EXPECT_NEAR(found->period.count(), 300.0, 0.5);
  EXPECT_LT(found->margin.count(), 3.0);
  EXPECT_EQ(found->quiet.count(), 0.0);
  EXPECT_EQ(found->requests, 1.0);
}

TEST(a_period, has_a_window_around_the_next_bunch) {
  auto const seen = told(timer{.period = 60.0, .jitter = 2.0}.times(30));
  auto const next = seen.next(at(1000.0 + 29 * 60.0 + 3.0));
  ASSERT_TRUE(next);
  EXPECT_LT(next->begins, at(1000.0 + 30 * 60.0 - 1.0));
  EXPECT_GT(next->ends, at(1000.0 + 30 * 60.0 + 1.0));
  EXPECT_LT((next->ends - next->begins).count(), 7.0);
}

TEST(a_period, is_over_when_three_bunches_were_left_out) {
  auto const seen = told(timer{.period = 100.0}.times(20, 0.0));
  double const last = 1900.0;
  EXPECT_TRUE(seen.next(at(last + 250.0)));
  EXPECT_NEAR((seen.next(at(last + 250.0))->begins - at(0.0)).count(), last + 300.0, 3.0);
  EXPECT_FALSE(seen.next(at(last + 310.0)));
  EXPECT_FALSE(seen.found(at(last + 310.0)));
  ASSERT_TRUE(seen.lapses());
  EXPECT_NEAR((*seen.lapses() - at(0.0)).count(), last + 300.0, 3.0);
}

TEST(a_period, is_found_anew_after_it_has_changed) {
  auto times = timer{.period = 100.0}.times(30, 0.0);
  auto const later = timer{.period = 170.0}.times(12, times.back() + 170.0);
  times.insert(times.end(), later.begin(), later.end());
  auto const found = told(times).found(at(times.back() + 1.0));
  ASSERT_TRUE(found);
  EXPECT_NEAR(found->period.count(), 170.0, 1.0);
}

TEST(a_period, follows_a_timer_that_counts_from_the_last_time) {
  numbers random{5};
  std::vector<double> times{0.0};
  for (int i = 0; i < 60; ++i) {
    times.push_back(times.back() + 300.0 + 10.0 * random.uniform());
  }
  period_estimator seen;
  int asked = 0, expected = 0;
  for (double const each : times) {
    if (auto const next = seen.next(at(each))) {
      ++asked;
      expected += at(each) >= next->begins && at(each) <= next->ends ? 1 : 0;
    }
    seen.count(at(each));
  }
  EXPECT_GE(asked, 40);
  EXPECT_GE(expected, asked - 4);
}

TEST(a_period, tells_what_a_bunch_is_like) {
  auto const seen =
      told(timer{.period = 600.0, .jitter = 5.0, .bunch = 6.0, .spread = 20.0}.times(40));
  auto const found = seen.found(at(1000.0 + 39 * 600.0 + 30.0));
  ASSERT_TRUE(found);
  EXPECT_NEAR(found->period.count(), 600.0, 1.0);
  EXPECT_NEAR(found->requests, 6.0, 1.0);
  EXPECT_GT(found->quiet.count(), 5.0);
  EXPECT_LE(found->quiet.count(), 20.0);
  EXPECT_NEAR(found->span.count(), 17.0, 4.0);
}

TEST(a_period, is_the_same_whenever_it_begins_and_however_long) {
  for (double const period : {5.0, 60.0, 3600.0, 86400.0}) {
    timer const every{.period = period, .jitter = 0.01 * period};
    auto const one = told(every.times(30, 10.0));
    auto const other = told(every.times(30, 1e6));
    auto const a = one.found(at(10.0 + 29.02 * period));
    auto const b = other.found(at(1e6 + 29.02 * period));
    ASSERT_TRUE(a && b) << period;
    EXPECT_NEAR(a->period.count(), b->period.count(), 1e-3 * period);
    EXPECT_NEAR(a->period.count(), period, 0.01 * period);
  }
}

TEST(a_period, does_not_mind_requests_whose_instants_go_back) {
  period_estimator seen;
  for (int i = 0; i < 20; ++i) {
    seen.count(at(100.0 * i));
    seen.count(at(100.0 * i - 0.5));
  }
  auto const found = seen.found(at(1901.0));
  ASSERT_TRUE(found);
  EXPECT_NEAR(found->period.count(), 100.0, 1.0);
}

/// Each of what a timer may do wrong, many times: a bunch is expected when it comes.
class what_timers_do : public testing::TestWithParam<timer> {};

TEST_P(what_timers_do, is_expected_nine_times_of_ten) {
  int asked = 0, expected = 0, periods = 0;
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    timer its = GetParam();
    its.seed = seed;
    period_estimator seen;
    auto const times = its.times(120);
    double begun = -1e9;
    for (std::size_t i = 0; i < times.size(); ++i) {
      double const on_grid = std::remainder(times[i] - 1000.0, its.period);
      bool const is_of_timer = on_grid >= -its.jitter && on_grid <= its.jitter;
      if (is_of_timer && times[i] - begun > 0.5 * its.period &&
          times[i] > 1000.0 + 40 * its.period) {
        ++periods;
        if (auto const next = seen.next(at(times[i]))) {
          ++asked;
          expected += at(times[i]) >= next->begins && at(times[i]) <= next->ends ? 1 : 0;
        }
      }
      begun = is_of_timer ? times[i] : begun;
      seen.count(at(times[i]));
    }
  }
  EXPECT_GE(asked, 9 * periods / 10);
  EXPECT_GE(expected, 9 * asked / 10);
}

INSTANTIATE_TEST_SUITE_P(
    periods, what_timers_do,
    testing::Values(
        timer{}, timer{.jitter = 3.0}, timer{.jitter = 25.0}, timer{.jitter = 5.0, .missed = 0.1},
        timer{.jitter = 5.0, .extra = 0.1}, timer{.jitter = 2.0, .missed = 0.1, .extra = 0.15},
        timer{.period = 3600.0, .jitter = 60.0, .bunch = 10.0, .spread = 30.0},
        timer{.period = 60.0, .jitter = 1.0, .bunch = 3.0, .spread = 2.0, .missed = 0.05}));

/// In what `draw` makes of each of the means, five times anew.
template <typename Draw>
void expect_no_period(std::vector<double> const& means, Draw const& draw) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    for (double const mean : means) {
      numbers random{seed};
      EXPECT_EQ(share_of_time_with_a_period(draw(random, mean)), 0.0) << mean << " " << seed;
    }
  }
}

TEST(no_period, is_seen_in_poisson_processes) {
  expect_no_period({0.3, 2.0, 10.0, 60.0, 900.0}, [](numbers& random, double mean) {
    std::vector<double> times;
    for (double t = 0.0; times.size() < 20'000; t += random.gap(mean)) {
      times.push_back(t);
    }
    return times;
  });
}

TEST(no_period, is_seen_in_a_process_that_feeds_itself) {
  expect_no_period({10.0, 100.0}, [](numbers& random, double mean) {
    std::vector<double> times;
    // Each has offspring of its own, one in two of them on average: clusters of a Hawkes process.
    for (double t = 0.0; times.size() < 20'000; t += random.gap(mean)) {
      std::vector<double> cluster{t};
      for (std::size_t i = 0; i < cluster.size(); ++i) {
        for (double child = random.gap(2.0); child < 60.0 && random.uniform() < 0.33;
             child += random.gap(2.0)) {
          cluster.push_back(cluster[i] + child);
        }
      }
      times.insert(times.end(), cluster.begin(), cluster.end());
    }
    std::sort(times.begin(), times.end());
    return times;
  });
}

TEST(no_period, is_seen_in_a_switching_process) {
  expect_no_period({10.0, 100.0}, [](numbers& random, double stay) {
    std::vector<double> times;
    double t = 0.0;
    for (bool is_busy = true; times.size() < 20'000; is_busy = !is_busy) {
      double const end = t + random.gap(stay);
      double const mean = is_busy ? 2.0 : 60.0;
      for (t += random.gap(mean); t < end; t += random.gap(mean)) {
        times.push_back(t);
      }
      t = end;
    }
    return times;
  });
}

TEST(no_period, is_seen_in_gaps_that_vary_half_as_much_as_those_of_a_poisson_process) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    numbers random{seed};
    std::vector<double> times;
    double t = 0.0;
    while (times.size() < 20'000) {
      t += random.gap(25.0) + random.gap(25.0) + random.gap(25.0) + random.gap(25.0);
      times.push_back(t);
    }
    EXPECT_LT(share_of_time_with_a_period(times), 0.001) << seed;
  }
}

TEST(an_estimator, is_of_bounded_size) {
  EXPECT_LE(sizeof(period_estimator), 2048U);
}

/// What another one, whose clock begins at 7 s, makes of it so much later.
period_estimator after(period_estimator const& before, double now_s, double age_s) {
  period_estimator next;
  next.recall(before.kept(at(now_s)), seconds{age_s}, at(7.0));
  return next;
}

TEST(a_period, goes_on_in_its_phase_when_another_one_recalls_it) {
  timer const every{.period = 60.0, .jitter = 2.0, .bunch = 3.0, .spread = 4.0};
  double const last = 1000.0 + 29 * 60.0, now = last + 10.0;
  auto const seen = told(every.times(30));
  auto const before = *seen.next(at(now));
  for (double const age : {0.0, 5.0, 30.0}) {
    auto const next = after(seen, now, age);
    auto const found = next.found(at(7.0));
    ASSERT_TRUE(found) << age;
    EXPECT_NEAR(found->period.count(), seen.found(at(now))->period.count(), 1e-9);
    EXPECT_EQ(found->requests, seen.found(at(now))->requests);
    auto const window = *next.next(at(7.0));
    EXPECT_NEAR((window.begins - at(7.0)).count(), (before.begins - at(now)).count() - age, 1e-6);
    EXPECT_NEAR((window.ends - at(7.0)).count(), (before.ends - at(now)).count() - age, 1e-6);
  }
}

TEST(a_period, is_not_broken_by_a_time_in_which_nobody_watched) {
  timer const every{.period = 60.0, .jitter = 1.0};
  double const last = 1000.0 + 29 * 60.0, now = last + 10.0;
  auto const seen = told(every.times(30));
  auto next = after(seen, now, 9 * 60.0);
  auto const window = next.next(at(7.0));
  ASSERT_TRUE(window);
  auto const before = *seen.next(at(now));
  EXPECT_NEAR((window->ends - at(7.0)).count() + (window->begins - at(7.0)).count(),
              (before.ends - at(now)).count() + (before.begins - at(now)).count(), 1e-6)
      << "the same phase";
  EXPECT_NEAR((window->ends - window->begins) / (before.ends - before.begins), std::sqrt(10.0),
              1e-6)
      << "less is known of it";
  for (int i = 0; i < 12; ++i) {
    next.count(at(7.0 + 50.0 + 60.0 * i));
    ASSERT_TRUE(next.found(at(7.0 + 51.0 + 60.0 * i))) << i;
  }
  EXPECT_LT(next.found(at(7.0 + 720.0))->left_out, 0.1) << "what nobody has seen was not left out";
  EXPECT_LT(next.next(at(7.0 + 720.0))->ends - next.next(at(7.0 + 720.0))->begins, seconds{6.0});
}

TEST(a_period, is_given_up_where_nobody_knows_its_phase_any_more) {
  timer const every{.period = 60.0, .jitter = 0.5};
  double const now = 1000.0 + 29 * 60.0 + 10.0;
  EXPECT_TRUE(after(told(every.times(30)), now, 20 * 60.0).found(at(7.0)));
  EXPECT_FALSE(after(told(every.times(30)), now, 30 * 60.0).found(at(7.0)));
  timer const rough{.period = 60.0, .jitter = 5.0};
  EXPECT_TRUE(after(told(rough.times(30)), now, 10.0).found(at(7.0)));
  EXPECT_FALSE(after(told(rough.times(30)), now, 10 * 60.0).found(at(7.0)));
  EXPECT_FALSE(after(told(every.times(30)), now + 4 * 60.0, 0.0).found(at(7.0)))
      << "it was over before";
}

TEST(a_period, is_found_of_what_two_have_seen_together) {
  timer const every{.period = 60.0, .jitter = 0.2};
  auto const times = every.times(8);
  period_estimator first;
  for (int i = 0; i < 5; ++i) {
    first.count(at(times[static_cast<std::size_t>(i)]));
  }
  EXPECT_FALSE(first.found(at(times[4])));
  period_estimator next;
  next.recall(first.kept(at(times[4] + 10.0)), seconds{20.0}, at(times[4] + 30.0));
  for (std::size_t i = 5; i < 8; ++i) {
    next.count(at(times[i]));
  }
  EXPECT_TRUE(next.found(at(times[7])));
}

TEST(a_period, that_cannot_have_been_seen_is_not_recalled) {
  auto const good = told(timer{.period = 60.0, .jitter = 1.0}.times(30)).kept(at(2750.0));
  ASSERT_TRUE(good.found);
  double const nan = std::nan("");
  auto const refused = [&](auto const& change) {
    auto wrong = good;
    change(wrong);
    period_estimator next;
    EXPECT_THROW(next.recall(wrong, seconds{1.0}, at(0.0)), std::invalid_argument);
    EXPECT_FALSE(next.found(at(0.0)));
  };
  refused([&](auto& of) { of.last_s = nan; });
  refused([](auto& of) { of.last_s = of.now_s + 1.0; });
  refused([](auto& of) { of.by_silence.pop_back(); });
  refused([](auto& of) { of.by_silence[0].begins.clear(); });
  refused([](auto& of) { std::swap(of.by_silence[0].begins[0], of.by_silence[0].begins[1]); });
  refused([&](auto& of) { of.by_silence[1].begins[3] = nan; });
  refused([](auto& of) { of.by_silence[1].number = 3; });
  refused([](auto& of) { of.by_silence[2].span_s = -1.0; });
  refused([](auto& of) { of.found->silence = 5; });
  refused([](auto& of) { of.found->period_s = 0.0; });
  refused([&](auto& of) { of.found->margin_s = nan; });
  refused([](auto& of) { of.found->unexpected = of.found->bunches + 1.0; });
  period_estimator next;
  EXPECT_THROW(next.recall(good, seconds{-1.0}, at(0.0)), std::invalid_argument);
  EXPECT_THROW(next.recall(good, forever, at(0.0)), std::invalid_argument);
  next.recall({}, seconds{1.0}, at(0.0));
  EXPECT_FALSE(next.found(at(0.0)));
}

}  // namespace
}  // namespace sluice::scheduler
