#include "runtime/simulator/keeping.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/simulation.hpp"
#include "scheduler/periods.hpp"
#include "tests/runtime/simulator/refusal.hpp"

namespace sluice::simulator {
namespace {

using scheduler::seconds;
using testing::HasSubstr;

struct world {
  trace requests;
  std::vector<simulated_model> models;
  load_costs costs{};

  keeping_inputs inputs() const {
    return {
        .models = &models, .requests = &requests, .costs = costs, .memory_bytes = {1ULL << 40U}};
  }
  simulation_outcome run(std::string const& policy) const {
    auto const keeps = make_keeping(policy, inputs());
    return simulate(requests, models, *keeps, {.costs = costs});
  }
};

/// One model that is loaded in a second.
world with(std::string const& arrivals, double latency_s, double length_s = 5'000.0) {
  world made{
      .requests = generate(arrivals, {.length_s = length_s, .service_s = 0.1}),
      .models = {{.bytes = 64U << 20U,
                  .goal = {.percentile = 0.9, .latency = seconds{latency_s}, .attainment = 0.9}}}};
  made.costs.bytes_per_s = 64U << 20U;
  return made;
}

world with_gaps(std::vector<double> const& times, double length_s) {
  world made = with("poisson:rate=1", 0.5, 10.0);
  made.requests.requests.clear();
  made.requests.length_s = length_s;
  for (double const each : times) {
    made.requests.requests.push_back({each, 0.1, 0});
  }
  return made;
}

TEST(ours, keeps_the_promise_and_releases_as_the_server_does) {
  auto const it = with("poisson:rate=0.5", 0.8);
  auto const seen = it.run("ours:0B");
  EXPECT_GE(seen.in_time(), 0.9);
  EXPECT_GT(seen.released_share(), 0.02);
  auto const all = seen.all();
  EXPECT_EQ(all.predictions, all.requests);
  EXPECT_NEAR(all.predicted / static_cast<double>(all.predictions), seen.in_time(), 0.03);
}

TEST(ours, releases_at_once_where_a_load_is_in_time) {
  auto const seen = with("poisson:rate=0.5", 3.0).run("ours:0B");
  auto const cold = with("poisson:rate=0.5", 3.0).run("cold");
  EXPECT_NEAR(seen.released_share(), cold.released_share(), 0.02);
}

TEST(ours, keeps_no_memory_free_where_that_brings_nothing_into_time) {
  auto const it = with("poisson:rate=0.2", 3.0);
  EXPECT_NEAR(it.run("ours").released_share(), it.run("ours:0B").released_share(), 1e-9);
}

TEST(ours, keeps_memory_free_where_many_models_wait_for_handovers_alone) {
  world it;
  it.requests =
      generate("poisson:rate=0.2", {.length_s = 20'000.0, .models = 64, .service_s = 0.05});
  it.models.assign(64, {.bytes = 64U << 20U,
                        .goal = {.percentile = 0.1, .latency = seconds{0.5}, .attainment = 0.9}});
  it.costs = {.handover = measured_time{1.0}, .bytes_per_s = 640U << 20U};
  auto const with_reserve = it.run("ours");
  auto const without = it.run("ours:0B");
  EXPECT_GT(with_reserve.in_time(), without.in_time() + 0.1);
  EXPECT_GT(with_reserve.released_share(), without.released_share());
}

TEST(ours, predicts_the_models_of_a_device_together) {
  world it;
  it.requests = generate("poisson:rate=2", {.length_s = 4'000.0, .models = 2, .service_s = 0.2});
  for (auto& each : it.requests.requests) {
    each.service_s *= each.model == 1 ? 3.0 : 0.1;
  }
  // The one whose requests are short waits for the other's; alone nearly all of its requests would be in time.
  it.models.assign(
      2, {.bytes = 0, .goal = {.percentile = 0.1, .latency = seconds{0.3}, .attainment = 0.9}});
  auto const keeps = make_keeping("ours:0B", it.inputs());
  auto const seen =
      simulate(it.requests, it.models, *keeps, {.costs = it.costs, .count_from_s = 60.0});
  auto const& quick = seen.models[0];
  double const share = static_cast<double>(quick.within) / static_cast<double>(quick.requests);
  EXPECT_LT(share, 0.6);
  EXPECT_NEAR(quick.predicted / static_cast<double>(quick.predictions), share, 0.03);
}

/// The most that a fixed keep-alive releases which answers at least as many in time.
double released_by_fixed_at(world const& it, double in_time) {
  double most = 0.0;
  for (auto const* const policy :
       {"cold", "fixed:1s", "fixed:3s", "fixed:10s", "fixed:30s", "fixed:100s", "fixed:290s",
        "fixed:320s", "fixed:650s", "fixed:950s", "always"}) {
    auto const seen = it.run(policy);
    most = seen.in_time() >= in_time ? std::max(most, seen.released_share()) : most;
  }
  return most;
}

/// Requests by a timer, whose cold starts are late.
class a_timer : public testing::TestWithParam<std::string> {};

TEST_P(a_timer, is_answered_by_ours_with_far_less_memory_than_by_a_fixed_keep_alive) {
  auto const it = with(GetParam(), 0.5, 300'000.0);
  auto const seen = it.run("ours");
  EXPECT_GE(seen.in_time(), 0.95);
  EXPECT_GT(seen.released_share(), 0.7);
  EXPECT_GT(seen.released_share(), released_by_fixed_at(it, seen.in_time()) + 0.5);
}

INSTANTIATE_TEST_SUITE_P(
    prewarming, a_timer,
    testing::Values("periodic:period=300", "periodic:period=300,jitter=10",
                    "periodic:period=300,jitter=5,bunch=5,spread=10",
                    "periodic:period=300,jitter=5,bunch=3,spread=2,missed=0.05"));

TEST(ours, prewarms_each_of_several_models_at_its_own_time) {
  auto it = with("poisson:rate=1", 0.5, 10.0);
  it.requests = generate("periodic:period=300,jitter=5,bunch=3,spread=2",
                         {.length_s = 100'000.0, .models = 4, .service_s = 0.05});
  it.models.assign(4, it.models.front());
  auto const seen = it.run("ours");
  for (auto const& each : seen.models) {
    EXPECT_GT(each.within, 0.9 * static_cast<double>(each.requests));
    EXPECT_GT(each.released_s, 0.7 * seen.length_s);
  }
}

TEST(ours, loads_three_times_in_vain_at_most_when_a_timer_has_ended) {
  std::vector<double> times;
  for (int i = 0; i < 60; ++i) {
    times.push_back(i * 300.0);
  }
  auto const it = with_gaps(times, 100'000.0);
  auto const keeps = make_keeping("ours", it.inputs());
  auto const after =
      simulate(it.requests, it.models, *keeps, {.costs = it.costs, .count_from_s = 17'750.0});
  EXPECT_GE(after.all().loads, 1U);
  EXPECT_LE(after.all().loads, 3U);
  EXPECT_GT(after.released_share(), 0.99);
}

TEST(no_other_process, is_taken_for_a_timer) {
  for (auto const* const process :
       {"poisson:rate=0.1", "mmpp:rates=0.18/0.02,switches=0.02/0.02",
        "hawkes:rate=0.1,branching=0.5,decay=0.5", "lognormal:rate=0.1,scv=4",
        "diurnal:rate=0.1,swing=0.5,period=7200", "mmpp:rates=5/0,switches=0.2/0.02"}) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      scheduler::period_estimator seen;
      for (auto const& each : generate(process, {.length_s = 200'000.0, .seed = seed}).requests) {
        scheduler::instant const now{seconds{each.at_s}};
        seen.count(now);
        ASSERT_FALSE(seen.found(now)) << process << " at " << each.at_s;
      }
    }
  }
}

TEST(partial, keeps_the_promise_with_what_makes_cold_starts_quick_enough) {
  // A whole load is too late for all, half of one for hardly any.
  auto const it = with("poisson:rate=0.2", 0.8, 20'000.0);
  auto const seen = it.run("partial");
  auto const all = seen.all();
  EXPECT_GE(seen.in_time(), 0.9);
  EXPECT_GT(seen.released_share(), 0.4);
  EXPECT_LT(it.run("ours").released_share(), 0.15);
  EXPECT_GT(all.cold, all.requests / 2);
  EXPECT_NEAR(all.predicted / static_cast<double>(all.predictions), seen.in_time(), 0.03);
}

TEST(partial, leaves_nothing_where_a_whole_load_is_in_time) {
  auto const it = with("poisson:rate=0.5", 3.0);
  EXPECT_NEAR(it.run("partial").released_share(), it.run("ours").released_share(), 0.02);
}

TEST(partial, shares_out_memory_that_not_all_models_have_room_in) {
  world it;
  it.requests =
      generate("poisson:rate=0.3,zipf=1", {.length_s = 20'000.0, .models = 8, .service_s = 0.05});
  it.models.assign(8, {.bytes = 64U << 20U,
                       .goal = {.percentile = 0.9, .latency = seconds{0.8}, .attainment = 0.95}});
  it.costs.bytes_per_s = 64U << 20U;
  auto const in_half_of_it = [&](char const* policy) {
    auto inputs = it.inputs();
    inputs.memory_bytes = {4U * 64U << 20U};
    auto const keeps = make_keeping(policy, inputs);
    return simulate(
        it.requests, it.models, *keeps,
        {.costs = it.costs, .memory_bytes = inputs.memory_bytes, .count_from_s = 2'000.0});
  };
  auto const partial = in_half_of_it("partial");
  auto const whole = in_half_of_it("ours");
  auto const always = in_half_of_it("always");
  EXPECT_GT(partial.in_time(), whole.in_time() + 0.05);
  EXPECT_GT(partial.in_time(), always.in_time() + 0.05);
  EXPECT_GT(partial.released_share(), always.released_share());
  auto const all = partial.all();
  EXPECT_NEAR(all.predicted / static_cast<double>(all.predictions), partial.in_time(), 0.1);
}

/// Goes at once, and is loaded ten seconds later.
class back_in_ten_seconds final : public keeping {
 public:
  double idle_timeout(model_number /*model*/, double /*idle_since_s*/, double now_s) override {
    return now_s > 11.0 ? never : 0.0;
  }
  std::optional<double> load_at(model_number /*model*/, double now_s) override {
    return now_s > 0.0 ? std::optional{now_s + 10.0} : std::nullopt;
  }
};

TEST(a_load_that_was_planned, is_not_done_when_somebody_has_asked_meanwhile) {
  auto const it = with_gaps({0.0, 6.0}, 17.0);  // gone at 1.1, and again at 7.1
  back_in_ten_seconds policy;
  auto const seen = simulate(it.requests, it.models, policy, {.costs = it.costs});
  EXPECT_NEAR(seen.all().released_s, (6.0 - 1.1) + (17.0 - 7.1), 1e-9);
}

TEST(clairvoyance, releases_every_gap_that_a_load_fits_and_nobody_waits_for_it) {
  auto const it = with("poisson:rate=0.2", 0.5);
  auto const seen = it.run("clairvoyant");
  auto const warm = it.run("always");
  EXPECT_NEAR(seen.in_time(), warm.in_time(), 0.002);
  EXPECT_GT(seen.released_share(), it.run("fixed:1s").released_share());
  EXPECT_EQ(seen.all().answered, warm.all().answered);
}

TEST(clairvoyance, loads_just_in_time) {
  auto const seen = with_gaps({5.0, 5.5, 10.0}, 20.0).run("clairvoyant");
  EXPECT_NEAR(seen.all().waits_s, 0.0, 1e-9);
  // Gone to 4, from 5.6 to 9, and from 10.1 on.
  EXPECT_NEAR(seen.all().released_s, 4.0 + 3.4 + 9.9, 1e-9);
  EXPECT_EQ(seen.all().loads, 2U);
}

TEST(sirius, keeps_twice_its_reserve_and_then_gives_up_what_was_least_asked_for) {
  world it;
  it.models.assign(4, {.bytes = 100, .goal = {.latency = seconds{1.0}}});
  it.requests.models.assign(4, "m");
  auto const policy = make_keeping("sirius:5s/100B", it.inputs());
  for (model_number m = 0; m < 4; ++m) {
    for (unsigned i = 0; i <= m; ++i) {
      EXPECT_TRUE(policy->on_arrival(m, 0.0, i).admitted);
    }
    EXPECT_EQ(policy->idle_timeout(m, 0.0, 0.0), 5.0);
  }
  std::vector<model_number> go;
  policy->on_idle_end(3, go);
  policy->on_idle_end(0, go);
  EXPECT_TRUE(go.empty());  // as much as twice the reserve
  policy->on_idle_end(1, go);
  EXPECT_EQ(go, (std::vector<model_number>{0, 1}));
  go.clear();
  EXPECT_TRUE(policy->on_arrival(3, 1.0, 9).admitted);  // is in use again
  policy->on_idle_end(1, go);
  policy->on_idle_end(2, go);
  EXPECT_TRUE(go.empty());
}

TEST(sirius, answers_from_its_reserve_without_a_load) {
  auto it = with_gaps({0.0, 100.0}, 200.0);
  EXPECT_EQ(it.run("sirius:5s/64MiB").all().loads, 1U);
  EXPECT_EQ(it.run("sirius:5s/1B").all().loads, 2U);
}

TEST(the_wild_policy, learns_gaps_and_loads_before_the_next_request) {
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    times.push_back(i * 600.0);  // every ten minutes
  }
  auto const seen = with_gaps(times, 30'000.0).run("wild");
  auto const all = seen.all();
  // The first two are kept for four hours; from then on it is gone for 90 % of nine minutes.
  EXPECT_LE(all.cold, 2U);
  EXPECT_GT(all.loads, 40U);
  EXPECT_NEAR(seen.released_share(), 0.9 * 9.0 / 10.0, 0.06);
}

TEST(the_wild_policy, keeps_a_model_for_hours_while_its_gaps_say_little) {
  // Longer than the histogram: kept for its four hours each time.
  auto const seen = with_gaps({0.0, 18'000.0, 36'000.0}, 50'000.0).run("wild");
  EXPECT_EQ(seen.all().loads, 3U);
  EXPECT_NEAR(seen.all().released_s, 2 * (18'000.0 - 14'400.0 - 1.1), 0.1);
}

TEST(a_policys_description, is_refused_with_what_there_is) {
  auto const refusal = [](std::string const& text) {
    return refusal_of([&] { (void)parse_keeping(text); });
  };
  EXPECT_THAT(
      refusal("lru"),
      HasSubstr(
          "there is no policy 'lru'; there are ours, ours:1GiB, partial, partial:1GiB, always"));
  EXPECT_THAT(refusal("ours:5s"), HasSubstr("policy 'ours:5s'"));
  EXPECT_THAT(refusal("fixed:"), HasSubstr("there is no policy"));
  EXPECT_THAT(refusal("fixed:10"), HasSubstr("policy 'fixed:10'"));
  EXPECT_THAT(refusal("sirius:5s"), HasSubstr("must be a time and a size"));
  EXPECT_THAT(refusal("partial:"), HasSubstr("there is no policy"));
  EXPECT_THAT(refusal("partial:5s"), HasSubstr("policy 'partial:5s'"));
  EXPECT_EQ(parse_keeping("partial:1KiB").reserve_bytes, 1024U);
  EXPECT_GT(parse_keeping("partial").resident_parts, 1U);
  EXPECT_EQ(parse_keeping("ours:1KiB").resident_parts, 1U);
  EXPECT_EQ(parse_keeping("fixed:forever").timeout_s, never);
  EXPECT_EQ(parse_keeping("sirius").reserve_bytes, 1'000'000'000U);
}

}  // namespace
}  // namespace sluice::simulator
