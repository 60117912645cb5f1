#include "scheduler/model_controller.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

instant at(double s) {
  return instant{seconds{s}};
}

/// Serves a stream of requests in simulated time, first come first served, under the controller's
/// decisions.
class simulated_server {
 public:
  struct options {
    double calm_rate = 1.0;
    double burst_rate = 1.0;  // the stream switches between both rates
    double switches_per_s = 0.0;
    double service_s = 0.1;  // mean, exponential
    double load_s = 1.0;     // constant
    bool foretells = false;  // when an answer will come, with two deviations
  };
  struct totals {
    int requests = 0;
    int within = 0;
    int refused = 0;
    int loads = 0;
    double released_s = 0.0;
    double predicted_sum = 0.0;  // of the attainment in force, request by request
    double share() const { return static_cast<double>(within) / requests; }
    double predicted() const { return predicted_sum / requests; }
  };

  simulated_server(model_settings const& settings, options const& how)
      : how_(how), latency_(settings.goal.latency.count()), model_(settings, at(0.0)) {
    report_ = model_.tick(at(0.0));
  }

  totals run_until(double end) {
    totals t;
    for (;;) {
      double const rate = bursting_ ? how_.burst_rate : how_.calm_rate;
      double const arrival = now_ + exponential(1.0 / rate);
      double const change =
          how_.switches_per_s > 0.0 ? now_ + exponential(1.0 / how_.switches_per_s) : end + arrival;
      double const next = std::min({arrival, change, end});
      while (next_tick_ <= next) {
        deliver_until(next_tick_);
        report_ = model_.tick(at(next_tick_));
        next_tick_ += tick_s;
      }
      now_ = next;
      if (now_ >= end) {
        return t;
      }
      if (change < arrival) {
        bursting_ = !bursting_;
        continue;
      }
      serve(t);
    }
  }
  model_report const& report() const { return report_; }

 private:
  static constexpr double tick_s = 5.0;
  struct completion {
    double at;
    double service;
    double response;
    double load;
  };

  double exponential(double mean) {
    return -mean * std::log((static_cast<double>(random_()) + 0.5) / 4294967296.0);
  }
  void deliver_until(double t) {
    while (first_ < done_.size() && done_[first_].at <= t) {
      auto const& c = done_[first_++];
      if (c.load > 0.0) {
        model_.on_load(at(c.at), seconds{c.load}, seconds{0.1 * c.load});
      }
      model_.on_service(at(c.at), seconds{c.service}, seconds{c.response});
    }
  }
  void serve(totals& t) {
    deliver_until(now_);
    ++t.requests;
    t.predicted_sum += report_.warm.chosen.attainment;
    auto const expected =
        how_.foretells
            ? std::optional{seconds{std::max(0.0, free_at_ - now_) + 3.0 * how_.service_s}}
            : std::nullopt;
    if (!model_.on_arrival(at(now_), 0, expected).admitted) {
      ++t.refused;
      return;
    }
    double const timeout = model_.idle_timeout().count();
    double start = std::max(now_, free_at_);
    double load = 0.0;
    if (now_ - free_at_ > timeout) {
      t.released_s += now_ - free_at_ - timeout;
      ++t.loads;
      load = how_.load_s;
      start += load;
    }
    double const service = exponential(how_.service_s);
    free_at_ = start + service;
    t.within += free_at_ - now_ <= latency_ ? 1 : 0;
    done_.push_back({free_at_, service, free_at_ - now_, load});
  }

  options how_;
  double latency_;
  model_controller model_;
  model_report report_;
  std::mt19937 random_{11};
  bool bursting_ = false;
  double now_ = 0.0;
  double free_at_ = 0.0;
  double next_tick_ = tick_s;
  std::vector<completion> done_;
  std::size_t first_ = 0;
};

model_settings settings(double percentile, double latency) {
  return {.goal = {.percentile = percentile,
                   .latency = seconds{latency},
                   .attainment = 0.9,
                   .window = seconds{300.0}},
          .weight_bytes = 1 << 20,
          .service = {.mean = seconds{0.05}},
          .load = {.mean = seconds{0.5}}};
}

TEST(model_controller, keeps_the_promise_and_predicts_it_under_poisson_load) {
  simulated_server server{settings(0.9, 0.8), {.calm_rate = 0.5, .burst_rate = 0.5}};
  (void)server.run_until(600.0);  // learns
  auto const t = server.run_until(20'000.0);
  EXPECT_TRUE(server.report().warm.feasible());
  EXPECT_GE(t.share(), 0.9);
  EXPECT_NEAR(t.share(), t.predicted(), 0.02);
  EXPECT_GT(t.released_s, 0.02 * 19'400.0);  // and gives memory away while doing so
  EXPECT_GT(t.loads, 100);
  EXPECT_EQ(t.refused, 0);
  EXPECT_NEAR(server.report().warm.service_mean.count(), 0.1, 0.02);
  EXPECT_NEAR(server.report().warm.load_mean.count(), 1.0, 1e-9);
  EXPECT_NEAR(server.report().handover_mean->count(), 0.1, 1e-9);
}

TEST(model_controller, releases_at_once_where_a_cold_start_keeps_the_latency) {
  simulated_server server{settings(0.9, 2.0), {.calm_rate = 0.5, .burst_rate = 0.5, .load_s = 0.2}};
  (void)server.run_until(2000.0);
  EXPECT_EQ(server.report().warm.chosen.idle_timeout.count(), 0.0);
  auto const t = server.run_until(10'000.0);
  EXPECT_GE(t.share(), 0.99);
}

TEST(model_controller, sees_bursts_and_plans_for_them) {
  // 18 and 2 requests per second in turn, at 50 ms: twice the wait of a Poisson stream of the same
  // mean, and more.
  simulated_server::options const bursts{.calm_rate = 2.0,
                                         .burst_rate = 18.0,
                                         .switches_per_s = 0.1,
                                         .service_s = 0.05,
                                         .load_s = 0.2};
  simulated_server server{settings(0.9, 1.0), bursts};
  (void)server.run_until(2000.0);
  auto const t = server.run_until(12'000.0);
  EXPECT_TRUE(server.report().bursty);
  EXPECT_GT(*server.report().dispersion, 4.0);
  EXPECT_GT(server.report().warm.arrivals_per_s,
            13.0);  // (18² + 2²)/20 = 16.4 is what an arrival sees
  EXPECT_NEAR(server.report().slow_rate_per_s, 10.0, 3.0);
  // Poisson at the mean rate would predict a warm share of 1 − e^{−10} ≈ 1.
  EXPECT_LT(t.predicted(), 0.99);
  EXPECT_NEAR(t.predicted(), t.share(), 0.06);
}

TEST(model_controller, refuses_the_excess_of_an_overload_so_that_the_rest_is_in_time) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  simulated_server server{
      s, {.calm_rate = 30.0, .burst_rate = 30.0, .service_s = 0.05, .load_s = 0.2}};
  (void)server.run_until(300.0);
  auto const t = server.run_until(2000.0);
  EXPECT_EQ(server.report().warm.reason, shortfall::overloaded);
  double const admitted = t.requests - t.refused;
  EXPECT_GT(t.refused, t.requests / 3);
  EXPECT_GT(admitted / 1700.0, 8.0);  // it still does most of what one server can do in time
  EXPECT_GE(t.within / admitted, 0.9);
}

/// Ten requests a second whose answers are expected in time and come after `response_s`; then a tick.
void answer(model_controller& model, double& now, int count, double response_s) {
  for (int i = 0; i < count; ++i, now += 0.1) {
    ASSERT_TRUE(model.on_arrival(at(now), 0, seconds{0.1}).admitted);
    model.on_service(at(now), seconds{0.05}, seconds{response_s});
  }
  (void)model.tick(at(now));
}

TEST(model_controller, refuses_only_what_would_be_late_where_that_is_foretold) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  simulated_server server{
      s,
      {.calm_rate = 30.0, .burst_rate = 30.0, .service_s = 0.05, .load_s = 0.2, .foretells = true}};
  (void)server.run_until(300.0);
  auto const t = server.run_until(2000.0);
  double const admitted = t.requests - t.refused;
  EXPECT_GE(t.within / admitted, 0.9);
  EXPECT_GT(t.within / 1700.0, 17.0);  // of twenty that one server can do
  EXPECT_NEAR(server.report().warm.admit_share, admitted / t.requests, 0.05);
}

TEST(model_controller, lets_as_many_be_late_as_it_may) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  double now = 0.0;
  auto const admits = [&](double expected_s) {
    return model.on_arrival(at(now), 0, seconds{expected_s});
  };
  answer(model, now, 200, 0.1);
  EXPECT_TRUE(admits(5.0).admitted);
  answer(model, now, 30, 0.6);
  auto const refused = admits(0.75);
  EXPECT_FALSE(refused.admitted);
  EXPECT_NEAR(refused.retry_after.count(), 0.25, 1e-9);
  EXPECT_TRUE(admits(0.5).admitted);
  answer(model, now, 400, 0.1);
  EXPECT_TRUE(admits(5.0).admitted);
  s.reject_on_miss = false;
  model = model_controller{s, at(now)};
  answer(model, now, 100, 0.6);
  EXPECT_TRUE(admits(5.0).admitted);
}

TEST(model_controller, lets_no_more_be_late_in_a_burst_before_its_first_answer) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  double now = 0.0;
  answer(model, now, 100, 0.1);
  int late = 0;
  for (int i = 0; i < 200; ++i) {
    late += model.on_arrival(at(now), 0, seconds{1.0}).admitted ? 1 : 0;
  }
  EXPECT_GT(late, 3);
  EXPECT_LE(late, 12);
}

TEST(model_controller, counts_who_is_turned_away_not_among_those_that_it_has_admitted) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  double now = 0.0;
  answer(model, now, 100, 0.1);
  for (int i = 0; i < 100; ++i) {
    model.on_turned_away(at(now), false, 0);
  }
  EXPECT_TRUE(model.on_arrival(at(now), 0, seconds{1.0}).admitted);
}

TEST(model_controller, predicts_of_all_where_only_some_are_admitted) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  simulated_server server{
      s,
      {.calm_rate = 30.0, .burst_rate = 30.0, .service_s = 0.05, .load_s = 0.2, .foretells = true}};
  (void)server.run_until(2000.0);
  EXPECT_EQ(server.report().warm.reason, shortfall::overloaded);
  EXPECT_LT(server.report().warm.log_odds, 1.0);
}

TEST(model_controller, refuses_nobody_where_all_are_late_however_few_come) {
  for (double const rate : {0.2, 2.0}) {  // in the latter case it is overloaded as well
    model_settings s = settings(0.9, 0.5);
    s.reject_on_miss = true;
    simulated_server server{s,
                            {.calm_rate = rate,
                             .burst_rate = rate,
                             .service_s = 2.0,
                             .load_s = 0.2,
                             .foretells = true}};
    (void)server.run_until(1000.0);
    EXPECT_EQ(server.run_until(2000.0).refused, 0);
  }
}

TEST(model_controller, queues_an_overload_where_the_policy_says_so) {
  simulated_server server{settings(0.9, 0.5),
                          {.calm_rate = 30.0, .burst_rate = 30.0, .service_s = 0.05}};
  auto const t = server.run_until(300.0);
  EXPECT_EQ(server.report().warm.reason, shortfall::overloaded);
  EXPECT_EQ(t.refused, 0);
  EXPECT_LT(server.report().warm.chosen.released_fraction, 1e-3);
}

TEST(model_controller, spreads_refusals_evenly) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  double now = 0.0;
  for (; now < 60.0; now += 0.01) {
    (void)model.on_arrival(at(now));
    model.on_service(at(now), seconds{0.02}, seconds{0.3});
  }
  auto const report = model.tick(at(now));
  ASSERT_LT(report.warm.admit_share, 1.0);
  int longest_run = 0;
  int run = 0;
  int admitted = 0;
  for (int i = 0; i < 1000; ++i) {
    auto const answer = model.on_arrival(at(now));
    run = answer.admitted ? 0 : run + 1;
    longest_run = std::max(longest_run, run);
    admitted += answer.admitted ? 1 : 0;
    if (!answer.admitted) {
      EXPECT_EQ(answer.retry_after, report.warm.retry_after);
    }
  }
  EXPECT_NEAR(admitted, 1000.0 * report.warm.admit_share, 1.0);
  EXPECT_LE(longest_run, static_cast<int>(1.0 / report.warm.admit_share) + 1);
}

TEST(model_controller, counts_what_it_was_told) {
  model_controller model{settings(0.9, 0.5), at(0.0)};
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(model.on_arrival(at(i)).admitted);
  }
  model.on_load(at(1.0), seconds{0.4}, seconds{0.01});
  model.on_service(at(1.0), seconds{0.1}, seconds{0.5});
  model.on_service(at(2.0), seconds{0.1}, seconds{0.51});
  model.on_failure(at(3.0));
  auto const report = model.tick(at(4.0));
  EXPECT_EQ(report.arrivals, 4U);
  EXPECT_EQ(report.services, 2U);
  EXPECT_EQ(report.loads, 1U);
  EXPECT_EQ(report.observed_requests, 3U);
  EXPECT_DOUBLE_EQ(*report.observed_attainment, 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(report.handover_mean->count(), 0.01);
  EXPECT_FALSE(report.dispersion.has_value());
}

TEST(model_controller, takes_the_load_of_a_part_for_what_all_would_have_taken) {
  auto of_all = settings(0.9, 0.5);
  auto of_parts = of_all;
  of_parts.resident_parts = 4;
  model_controller whole{of_all, at(0.0)};
  model_controller part{of_parts, at(0.0)};
  for (int i = 0; i < 300; ++i) {
    whole.on_load(at(i), seconds{1.1}, seconds{0.1});
    double const share = i < 20 ? 1.0 : 0.25;
    part.on_load(at(i), seconds{0.1 + 0.2 + 0.8 * share}, seconds{0.1}, share);
  }
  EXPECT_NEAR(whole.tick(at(300.0)).warm.load_mean.count(), 1.1, 0.02);
  auto const made = part.tick(at(300.0)).warm;
  EXPECT_NEAR(made.load_mean.count(), 1.1 - part.resident_share() * 0.8, 0.02);
  EXPECT_EQ(part.resident_share(), 0.25 * made.chosen.parts);

  of_parts.resident_parts = 0;
  EXPECT_THROW((model_controller{of_parts, at(0.0)}), std::invalid_argument);
}

TEST(model_controller, starts_without_any_knowledge) {
  model_settings s = settings(0.9, 0.2);
  s.limits = {.min_idle = seconds{2.0}, .max_idle = seconds{30.0}};
  model_controller model{s, at(50.0)};
  EXPECT_EQ(model.idle_timeout().count(), 30.0);
  auto const report = model.tick(at(50.0));
  EXPECT_FALSE(report.observed_attainment.has_value());
  EXPECT_FALSE(report.handover_mean.has_value());
  EXPECT_EQ(report.warm.chosen.idle_timeout.count(), 30.0);
  EXPECT_EQ(report.warm.reason,
            shortfall::max_idle);  // half a second of load, nobody known to come
  EXPECT_EQ(model.idle_timeout().count(), 30.0);
}

TEST(model_controller, what_it_has_decided_is_brought_within_new_limits) {
  auto s = settings(0.9, 0.2);
  s.limits = {.min_idle = seconds{2.0}, .max_idle = seconds{30.0}};
  model_controller model{s, at(0.0)};
  (void)model.tick(at(0.0));
  EXPECT_FALSE(model.has_news());
  model.set_limits({.min_idle = seconds{0.0}, .max_idle = seconds{5.0}});
  EXPECT_EQ(model.idle_timeout().count(), 5.0);
  EXPECT_TRUE(model.has_news());
  EXPECT_EQ(model.tick(at(1.0)).warm.chosen.idle_timeout.count(), 5.0);
  model.set_limits({.min_idle = seconds{8.0}, .max_idle = seconds{9.0}});
  EXPECT_EQ(model.idle_timeout().count(), 8.0);
  EXPECT_THROW(model.set_limits({.min_idle = seconds{2.0}, .max_idle = seconds{1.0}}),
               std::invalid_argument);
}

TEST(model_controller, is_not_disturbed_by_reports_out_of_order) {
  model_controller model{settings(0.9, 0.5), at(0.0)};
  for (double const t : {1.0, 3.0, 2.0, 2.5, 4.0}) {
    (void)model.on_arrival(at(t));
    model.on_service(at(t), seconds{0.1}, seconds{0.2});
  }
  auto const report = model.tick(at(3.5));
  EXPECT_EQ(report.observed_requests, 5U);
  EXPECT_TRUE(std::isfinite(report.slow_rate_per_s));
}

TEST(model_controller, refuses_settings_that_contradict_themselves) {
  model_settings s = settings(0.9, 0.5);
  s.goal.percentile = 90.0;
  EXPECT_THROW((model_controller{s, at(0.0)}), std::invalid_argument);
  s = settings(0.9, 0.5);
  s.limits = {.min_idle = seconds{3.0}, .max_idle = seconds{1.0}};
  EXPECT_THROW((model_controller{s, at(0.0)}), std::invalid_argument);
  s = settings(0.9, 0.5);
  s.load.mean = seconds{-1.0};
  EXPECT_THROW((model_controller{s, at(0.0)}), std::invalid_argument);
}

TEST(model_controller, has_news_where_something_has_moved_and_else_seldom) {
  std::mt19937_64 random{3};
  std::exponential_distribution<double> gap{2.0};
  std::exponential_distribution<double> service{20.0};
  model_controller model{settings(0.9, 0.5), at(0.0)};
  double now = 0.0;
  auto const play = [&](double length_s, double faster) {
    int decisions = 0;
    for (double const end = now + length_s; now < end; now += gap(random) / faster) {
      (void)model.on_arrival(at(now));
      model.on_service(at(now), seconds{service(random)}, seconds{0.1});
      if (model.has_news() || at(now) >= model.due()) {
        (void)model.tick(at(now));
        ++decisions;
      }
    }
    return decisions;
  };
  EXPECT_GT(play(60.0, 1.0), 3);
  (void)play(3600.0, 1.0);
  EXPECT_LT(play(3600.0, 1.0), 360);  // of 7200 requests
  EXPECT_FALSE(model.has_news());
  EXPECT_GT(play(20.0, 8.0), 0) << "traffic has risen";
}

TEST(model_controller, is_due_ever_more_rarely_while_it_hears_nothing) {
  model_controller model{settings(0.9, 0.5), at(0.0)};
  for (int i = 0; i < 400; ++i) {
    (void)model.on_arrival(at(0.5 * i));
    model.on_service(at(0.5 * i), seconds{0.05}, seconds{0.1});
  }
  double now = 200.0;
  (void)model.tick(at(now));
  double before = 0.0;
  for (int i = 0; i < 8; ++i) {
    double const silence = (model.due() - at(now)).count();
    ASSERT_GT(silence, before);
    before = silence;
    now += silence;
    (void)model.tick(at(now));
    ASSERT_FALSE(model.has_news());
  }
}

TEST(model_controller, counts_refusals_as_missed) {
  model_settings s = settings(0.9, 0.5);
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  double now = 0.0;
  for (int second = 1; second <= 120; ++second) {
    for (int i = 0; i < 30; ++i, now += 1.0 / 30.0) {
      if (model.on_arrival(at(now)).admitted) {
        model.on_service(at(now), seconds{0.1}, seconds{0.2});
      }
    }
    (void)model.tick(at(now));
  }
  auto const report = model.tick(at(now));
  ASSERT_GT(report.refused, 1000U);
  EXPECT_LT(*report.observed_attainment, 0.6);
  EXPECT_NEAR(*report.observed_attainment,
              1.0 - static_cast<double>(report.refused) / static_cast<double>(report.arrivals),
              1e-9);
}

TEST(model_controller, corrects_a_prediction_that_answers_belie_and_refuses_by_it) {
  model_settings s = settings(0.9, 0.5);
  s.goal.window = seconds{60.0};
  s.reject_on_miss = true;
  model_controller model{s, at(0.0)};
  model_report report = model.tick(at(0.0));
  double now = 0.0;
  auto const play = [&](int length_s, int in_time_of_ten) {
    for (int i = 0; i < 10 * length_s; ++i, now += 0.1) {
      if (model.on_arrival(at(now)).admitted) {
        model.on_service(at(now), seconds{0.01}, seconds{i % 10 < in_time_of_ten ? 0.1 : 2.0});
      }
      if (i % 10 == 9) {
        report = model.tick(at(now));
      }
    }
  };
  play(300, 5);  // its own queue explains nothing of that
  EXPECT_GT(report.warm.chosen.uncorrected, 0.99);
  EXPECT_EQ(report.warm.reason, shortfall::observed);
  EXPECT_LT(report.warm.log_odds, -1.0);
  EXPECT_LT(report.warm.admit_share, 0.5);
  EXPECT_NEAR(report.warm.chosen.attainment / report.warm.admit_share, 0.5, 0.1);
  play(600, 10);
  EXPECT_TRUE(report.warm.feasible());
  EXPECT_EQ(report.warm.admit_share, 1.0);
}

/// The decision after an hour in which of ten requests so many were in time, whatever was done, and then a quiet window in which all were.
model_report after_a_busy_hour(int in_time_of_ten) {
  model_controller model{settings(0.99, 0.5), at(0.0)};
  std::mt19937 random{5};
  double now = 0.0;
  for (int i = 0; now < 4000.0; ++i) {
    double const gap = -10.0 * std::log((static_cast<double>(random()) + 0.5) / 4294967296.0);
    now += std::min(gap, 60.0);
    bool const is_late = now < 3600.0 && i % 10 >= in_time_of_ten;
    (void)model.on_arrival(at(now));
    model.on_service(at(now), seconds{0.01}, seconds{is_late ? 2.0 : 0.1});
    (void)model.tick(at(now));
  }
  return model.tick(at(now));
}

TEST(model_controller, holds_little_in_a_quiet_window_where_busy_ones_miss) {
  auto const kept = after_a_busy_hour(10);
  auto const broken = after_a_busy_hour(0);
  ASSERT_TRUE(kept.warm.feasible());
  ASSERT_EQ(kept.observed_attainment, 1.0);
  ASSERT_EQ(broken.observed_attainment, 1.0) << "its last window is as quiet";
  EXPECT_LT(broken.warm.chosen.idle_timeout, kept.warm.chosen.idle_timeout);
  EXPECT_GT(broken.warm.chosen.released_fraction, kept.warm.chosen.released_fraction);
}

}  // namespace
}  // namespace sluice::scheduler
