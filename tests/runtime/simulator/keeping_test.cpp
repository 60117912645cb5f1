#include "runtime/simulator/keeping.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/simulation.hpp"

namespace sluice::simulator {
namespace {

using scheduler::seconds;
using testing::HasSubstr;

struct world {
  trace requests;
  std::vector<simulated_model> models;
  load_costs costs{};

  keeping_inputs inputs() const {
    return {.models = &models, .requests = &requests, .costs = costs, .memory_bytes = 1ULL << 40U};
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

TEST(ours, keeps_memory_free_for_models_that_are_expected) {
  auto const it = with("poisson:rate=0.2", 3.0);
  auto const seen = it.run("ours");
  auto const cold = it.run("cold");
  // As long as the model is gone as much as it needs is kept free for it, so that training has less.
  EXPECT_LT(seen.released_share(), 0.5 * cold.released_share());
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
      EXPECT_TRUE(policy->on_arrival(m, 0.0));
    }
    EXPECT_EQ(policy->idle_timeout(m, 0.0), 5.0);
  }
  std::vector<model_number> go;
  policy->on_idle_end(3, go);
  policy->on_idle_end(0, go);
  EXPECT_TRUE(go.empty());  // as much as twice the reserve
  policy->on_idle_end(1, go);
  EXPECT_EQ(go, (std::vector<model_number>{0, 1}));
  go.clear();
  EXPECT_TRUE(policy->on_arrival(3, 1.0));  // is in use again
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
  auto const refusal = [](std::string const& text) -> std::string {
    try {
      (void)parse_keeping(text);
    } catch (error const& wrong) {
      return wrong.what();
    }
    return "was taken";
  };
  EXPECT_THAT(refusal("lru"),
              HasSubstr("there is no policy 'lru'; there are ours, ours:1GiB, always"));
  EXPECT_THAT(refusal("ours:5s"), HasSubstr("policy 'ours:5s'"));
  EXPECT_THAT(refusal("fixed:"), HasSubstr("there is no policy"));
  EXPECT_THAT(refusal("fixed:10"), HasSubstr("policy 'fixed:10'"));
  EXPECT_THAT(refusal("sirius:5s"), HasSubstr("must be a time and a size"));
  EXPECT_EQ(parse_keeping("fixed:forever").timeout_s, never);
  EXPECT_EQ(parse_keeping("sirius").reserve_bytes, 1'000'000'000U);
}

}  // namespace
}  // namespace sluice::simulator
