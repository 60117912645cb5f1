// What a controller has learnt, and what another one makes of it.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "scheduler/model_controller.hpp"

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

instant at(double s) {
  return instant{seconds{s}};
}

model_settings settings() {
  return {.goal = {.percentile = 0.95, .latency = 300ms, .attainment = 0.99, .window = 300s},
          .weight_bytes = 1U << 30U,
          .service = {.mean = 10ms, .scv = 1.0},
          .load = {.mean = 5s, .scv = 0.25}};
}

constexpr double taught_s = 600.0;

/// A Poisson stream of two a second, services of about 50 ms, loads of 200 ms, of which every tenth answer is late.
model_controller taught() {
  std::mt19937 random{3};
  auto const exponential = [&](double mean) {
    return -mean * std::log((static_cast<double>(random()) + 0.5) / 4294967296.0);
  };
  model_controller model{settings(), at(0.0)};
  double tick_s = 1.0;
  int number = 0;
  for (double now = exponential(0.5); now < taught_s; now += exponential(0.5)) {
    for (; tick_s < now; tick_s += 1.0) {
      (void)model.tick(at(tick_s));
    }
    if (!model.on_arrival(at(now)).admitted) {
      continue;
    }
    bool const is_late = ++number % 10 == 0;
    model.on_service(at(now), seconds{exponential(0.05)}, is_late ? 1s : 60ms);
    if (number % 20 == 0) {
      model.on_load(at(now), 200ms, 50ms);
    }
  }
  return model;
}

TEST(experience, makes_another_controller_predict_the_same_at_once) {
  auto model = taught();
  auto const before = model.tick(at(taught_s));
  model_controller next{settings(), at(5.0)};  // of a process with a clock of its own
  next.recall(model.learnt(at(taught_s)), 0s, at(5.0));
  auto const after = next.tick(at(5.0));
  EXPECT_NEAR(after.slow_rate_per_s, before.slow_rate_per_s, 1e-9 * before.slow_rate_per_s);
  EXPECT_NEAR(after.fast_rate_per_s, before.fast_rate_per_s, 1e-9 * before.fast_rate_per_s);
  EXPECT_NEAR(after.warm.service_mean.count(), before.warm.service_mean.count(), 1e-12);
  EXPECT_NEAR(after.warm.load_mean.count(), 0.2, 1e-9);
  EXPECT_NEAR(after.warm.chosen.attainment, before.warm.chosen.attainment, 1e-3);
  EXPECT_EQ(after.warm.chosen.idle_timeout, before.warm.chosen.idle_timeout);
  EXPECT_FALSE(after.warm.changed);
  EXPECT_EQ(after.observed_requests, before.observed_requests);
  EXPECT_EQ(after.observed_attainment, before.observed_attainment);
  EXPECT_NEAR(*after.dispersion, *before.dispersion, 0.05);
  EXPECT_NEAR(after.warm.log_odds, before.warm.log_odds, 1e-9);
  EXPECT_EQ(after.arrivals, 0U) << "totals are of what this one was told";

  model_controller fresh{settings(), at(5.0)};
  auto const knows_nothing = fresh.tick(at(5.0));
  EXPECT_NE(knows_nothing.warm.chosen.idle_timeout, before.warm.chosen.idle_timeout);
}

TEST(experience, of_what_was_learnt_time_makes_less_and_less) {
  auto model = taught();
  auto const learnt = model.learnt(at(taught_s));
  auto const gaps_after = [&](seconds age) {
    model_controller next{settings(), at(0.0)};
    next.recall(learnt, age, at(0.0));
    return next.tick(at(0.0)).warm.gaps_observed;
  };
  double const whole = gaps_after(0s);
  EXPECT_GT(whole, 400.0);
  EXPECT_NEAR(gaps_after(24h), whole / std::exp(1.0), 1e-6);
  EXPECT_LT(gaps_after(24h * 30), 1e-3);

  model_controller old{settings(), at(0.0)};
  old.recall(learnt, 24h * 365, at(0.0));
  auto const seen = old.tick(at(0.0));
  EXPECT_EQ(seen.observed_requests, 0U);
  EXPECT_LT(seen.slow_rate_per_s, 1e-9);
  EXPECT_NEAR(seen.warm.service_mean.count(), settings().service.mean.count(), 1e-9);
  EXPECT_EQ(seen.warm.log_odds, 0.0);
}

TEST(experience, a_time_in_which_nobody_watched_is_no_silence) {
  decayed_rate rate{120s, at(0.0)};
  for (int i = 1; i <= 2000; ++i) {
    rate.count(at(0.5 * i));
  }
  decayed_rate next{120s, at(0.0)};
  next.recall(rate.kept(at(1000.0)), 60s, at(0.0));
  EXPECT_NEAR(next.per_second(at(0.0)), 2.0, 0.05);
  // What comes now counts for more than if it had been watched all the time.
  decayed_rate watching{120s, at(0.0)};
  watching.recall(rate.kept(at(1000.0)), 0s, at(0.0));
  for (int i = 1; i <= 600; ++i) {
    next.count(at(0.1 * i));
    watching.count(at(0.1 * i));
  }
  EXPECT_GT(next.per_second(at(60.0)), watching.per_second(at(60.0)));
  EXPECT_LT(next.per_second(at(60.0)), 10.0);
}

TEST(experience, answers_leave_the_window_while_nobody_watches) {
  attainment_window seen{60s, at(0.0)};
  for (int i = 0; i < 60; ++i) {
    seen.add(at(i + 0.5), i % 2 == 0);
  }
  auto const after = [&](seconds age) {
    attainment_window next{60s, at(0.0)};
    next.recall(seen.kept(at(59.9)), age, at(7.0));
    return next.read(at(7.0));
  };
  EXPECT_EQ(after(0s).requests, 60U);
  EXPECT_EQ(after(0s).within, 30U);
  EXPECT_EQ(after(20s).requests, 40U);
  EXPECT_EQ(after(61s).requests, 0U);
  attainment_window longer{120s, at(0.0)};
  longer.recall(seen.kept(at(59.9)), 0s, at(0.0));
  EXPECT_EQ(longer.read(at(0.0)).requests, 0U) << "its slices are others";
}

TEST(experience, another_promise_is_not_held_against_answers_to_the_last_one) {
  auto model = taught();
  auto const learnt = model.learnt(at(taught_s));
  auto other = settings();
  other.goal.latency = 2s;
  model_controller next{other, at(0.0)};
  next.recall(learnt, 0s, at(0.0));
  auto const seen = next.tick(at(0.0));
  EXPECT_EQ(seen.observed_requests, 0U);
  EXPECT_EQ(seen.warm.log_odds, 0.0);
  EXPECT_NEAR(seen.slow_rate_per_s, 2.0, 0.4);  // what clients do has nothing to do with it
}

TEST(experience, a_timeout_is_brought_within_the_limits_of_now) {
  auto model = taught();
  (void)model.tick(at(taught_s));
  auto learnt = model.learnt(at(taught_s));
  learnt.idle_timeout = forever;
  auto other = settings();
  other.limits = {1s, 2s};
  model_controller next{other, at(0.0)};
  next.recall(learnt, 0s, at(0.0));
  EXPECT_EQ(next.idle_timeout(), 2s);
}

/// One of the numbers of an experience, whichever it is.
double& some_number(experience& of, std::mt19937& random) {
  std::vector<double*> all{
      &of.rates.fast.events,     &of.rates.slow.watched,      &of.handovers,
      &of.attained.slice_s,      &of.attained.into_s,         &of.corrections.requests,
      &of.corrections.over,      &of.corrections.chance,      &of.corrections.clusters,
      &of.corrections.fitted,    &of.corrections.information, &of.corrections.batch_s,
      &of.corrections.batch_over};
  for (auto& each : of.dispersions) {
    all.insert(all.end(), {&each.closed, &each.weight, &each.sum, &each.square_sum});
  }
  for (auto& each : of.gaps) {
    all.insert(all.end(), {&each.weight, &each.total_s});
  }
  for (auto* const samples : {&of.services, &of.loads}) {
    for (auto& each : *samples) {
      all.push_back(&each);
    }
  }
  return *all[random() % all.size()];
}

TEST(experience, is_refused_or_does_no_harm_whatever_it_says) {
  constexpr std::array strange{0.0,
                               -1.0,
                               1e-300,
                               1e15,
                               1e18,
                               1e300,
                               std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};
  std::mt19937 random{11};
  auto model = taught();
  auto const sound = model.learnt(at(taught_s));
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    auto wild = sound;
    for (auto changes = random() % 4; changes < 4; ++changes) {
      some_number(wild, random) = strange.at(random() % strange.size());
    }
    if (random() % 10 == 0) {
      wild.gaps.push_back({random() % 1000, 1.0, 1.0});
    }
    if (random() % 10 == 0) {
      wild.attained.seen.resize(random() % 100, {.requests = 5, .within = random() % 8});
    }
    model_controller next{settings(), at(0.0)};
    auto const fresh = next.tick(at(0.0));
    try {
      next.recall(wild, seconds{static_cast<double>(random() % 1000)}, at(1.0));
    } catch (std::invalid_argument const&) {
      ++refused;
      auto const as_before = next.tick(at(0.0));
      ASSERT_EQ(as_before.warm.gaps_observed, fresh.warm.gaps_observed);
      ASSERT_EQ(as_before.observed_requests, 0U);
      continue;
    }
    auto const made = next.tick(at(2.0));
    ASSERT_GE(made.warm.chosen.attainment, 0.0);
    ASSERT_LE(made.warm.chosen.attainment, 1.0);
    ASSERT_GE(made.warm.chosen.released_fraction, 0.0);
    ASSERT_LE(made.warm.chosen.released_fraction, 1.0);
    ASSERT_GE(made.warm.chosen.idle_timeout.count(), 0.0);
    ASSERT_TRUE(std::isfinite(made.warm.chosen.loads_per_s));
  }
  EXPECT_GT(refused, 1000);
  EXPECT_LT(refused, 3000);
}

}  // namespace
}  // namespace sluice::scheduler
