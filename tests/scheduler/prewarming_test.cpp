/// How periods enter a model's decision (periods.hpp, warm_policy.hpp, model_controller.hpp).
#include <gtest/gtest.h>

#include <cmath>

#include "scheduler/model_controller.hpp"
#include "scheduler/reserve.hpp"

namespace sluice::scheduler {
namespace {

instant at(double s) {
  return instant{seconds{s}};
}

model_settings promised(double latency_s, bool may_prewarm = true) {
  return {.goal = {.percentile = 0.95, .latency = seconds{latency_s}, .attainment = 0.95},
          .weight_bytes = 1U << 30U,
          .service = {.mean = seconds{0.05}, .scv = 1.0},
          .load = {.mean = seconds{1.0}, .scv = 0.0},
          .may_prewarm = may_prewarm};
}

/// A request every `period`, each answered at once, with a tick a second.
double play(model_controller& model, double from, int periods, double period = 300.0) {
  double now = from;
  for (int i = 0; i < periods; ++i) {
    EXPECT_TRUE(model.on_arrival(at(now)).admitted);
    model.on_service(at(now + 0.05), seconds{0.05}, seconds{0.05});
    for (double t = now + 1.0; t < now + period; t += 1.0) {
      if (model.has_news() || model.due() <= at(t)) {
        (void)model.tick(at(t));
      }
    }
    now += period;
  }
  return now - period;  // of the last one
}

TEST(prewarming, releases_a_model_after_its_request_and_loads_it_before_the_next) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  double const idle = last + 0.05;
  auto const load = model.prewarm_at(at(idle + 1.0));
  ASSERT_TRUE(load);
  EXPECT_LT(*load, at(last + 300.0 - 1.0));
  EXPECT_GT(*load, at(last + 300.0 - 10.0));
  EXPECT_LT(model.idle_timeout_since(at(idle), at(idle + 1.0)).count(), 1.0);
  // Loaded, it waits until the request is late, and no longer.
  auto const waits = model.idle_timeout_since(*load + seconds{1.0}, *load + seconds{1.0});
  EXPECT_GT(*load + seconds{1.0} + waits, at(last + 300.0 + 1.0));
  EXPECT_LT(*load + seconds{1.0} + waits, at(last + 300.0 + 10.0));
}

TEST(prewarming, is_predicted_and_told) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  auto const made = model.tick(at(last + 10.0)).warm;
  ASSERT_TRUE(made.prewarm);
  EXPECT_TRUE(made.feasible());
  EXPECT_GT(made.chosen.released_fraction, 0.9);
  EXPECT_GE(made.chosen.attainment, made.required_share);
  EXPECT_GT(made.unaided_timeout.count(), 300.0);
  EXPECT_EQ(model.idle_timeout(), made.unaided_timeout);
  // Nobody waits for loads that are expected: no memory is kept free for them.
  EXPECT_LT(cold_model_of(made, 1U << 30U).loads_per_s, 0.1 * made.chosen.loads_per_s);
}

TEST(prewarming, is_not_for_a_model_whose_cold_starts_are_in_time) {
  model_controller model{promised(30.0), at(0.0)};
  double const last = play(model, 10.0, 40);
  EXPECT_FALSE(model.prewarm_at(at(last + 10.0)));
  EXPECT_EQ(model.idle_timeout().count(), 0.0);
}

TEST(prewarming, is_not_for_who_does_not_ask_for_it) {
  model_controller model{promised(0.5, false), at(0.0)};
  double const last = play(model, 10.0, 40);
  EXPECT_FALSE(model.prewarm_at(at(last + 10.0)));
  EXPECT_EQ(model.idle_timeout_since(at(last), at(last + 10.0)), model.idle_timeout());
}

TEST(prewarming, is_not_for_a_period_that_a_load_fills) {
  auto settings = promised(0.5);
  settings.load.mean = seconds{400.0};
  model_controller model{settings, at(0.0)};
  double const last = play(model, 10.0, 40);
  EXPECT_FALSE(model.prewarm_at(at(last + 10.0)));
}

TEST(prewarming, waits_no_longer_than_the_operator_lets_a_model_idle) {
  auto settings = promised(0.5);
  settings.limits.max_idle = seconds{2.0};  // a load takes one, and the window is wider
  model_controller model{settings, at(0.0)};
  double const last = play(model, 10.0, 40);
  EXPECT_FALSE(model.prewarm_at(at(last + 10.0)));
}

TEST(prewarming, ends_after_three_requests_that_did_not_come) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  int loads = 0;
  for (double t = last + 1.0; t < last + 20 * 300.0; t += 1.0) {
    if (model.has_news() || model.due() <= at(t)) {
      (void)model.tick(at(t));
    }
    auto const load = model.prewarm_at(at(t));
    loads += load && *load > at(t - 1.0) && *load <= at(t) ? 1 : 0;
  }
  EXPECT_GE(loads, 1);
  EXPECT_LE(loads, 3);
  EXPECT_FALSE(model.tick(at(last + 20 * 300.0)).warm.prewarm);
}

TEST(prewarming, stays_where_a_load_would_follow_at_once) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  auto const load = model.prewarm_at(at(last + 10.0));
  ASSERT_TRUE(load);
  // Somebody came when it was about to be loaded: it stays for the one that is expected.
  auto const stays = model.idle_timeout_since(*load, *load);
  EXPECT_GT(*load + stays, at(last + 300.0));
}

TEST(prewarming, stays_that_was_there_sooner_than_expected) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  auto const load = model.prewarm_at(at(last + 10.0));
  ASSERT_TRUE(load);
  auto const idle_since = *load - seconds{5.0};
  EXPECT_GT(idle_since + model.idle_timeout_since(idle_since, idle_since, true), at(last + 300.0));
  EXPECT_LT(idle_since + model.idle_timeout_since(idle_since, idle_since), at(last + 300.0));
  auto const late = at(last + 450.0);  // nobody has come
  EXPECT_LT(idle_since + model.idle_timeout_since(idle_since, late, true), late);
}

TEST(prewarming, begins_anew_with_other_limits) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  ASSERT_TRUE(model.prewarm_at(at(last + 10.0)));
  model.set_limits({.min_idle = seconds{0.0}, .max_idle = seconds{2.0}});
  EXPECT_FALSE(model.prewarm_at(at(last + 10.0)));
  EXPECT_LE(model.idle_timeout_since(at(last), at(last + 10.0)).count(), 2.0);
}

TEST(prewarming, goes_on_in_the_controller_of_a_server_that_comes_after) {
  model_controller model{promised(0.5), at(0.0)};
  double const last = play(model, 10.0, 40);
  auto const now = at(last + 20.0);
  auto const before = model.prewarm_at(now);
  ASSERT_TRUE(before);
  auto const learnt = model.learnt(now);

  model_controller next{promised(0.5), at(5.0)};
  next.recall(learnt, seconds{30.0}, at(5.0));
  EXPECT_FALSE(next.prewarm_at(at(5.0))) << "nothing has been decided yet";
  (void)next.tick(at(5.0));
  auto const after = next.prewarm_at(at(5.0));
  ASSERT_TRUE(after);
  EXPECT_NEAR((*after - at(5.0)).count(), (*before - now).count() - 30.0, 1e-6);

  model_controller other{promised(0.5, false), at(5.0)};
  other.recall(learnt, seconds{30.0}, at(5.0));
  (void)other.tick(at(5.0));
  EXPECT_FALSE(other.prewarm_at(at(5.0)));
}

}  // namespace
}  // namespace sluice::scheduler
