#include "runtime/simulator/simulation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/placing.hpp"

namespace sluice::simulator {
namespace {

using scheduler::seconds;
using testing::HasSubstr;

std::vector<simulated_model> models_of(std::size_t count, double latency_s = 1.0) {
  return {count, {.bytes = 100, .goal = {.latency = seconds{latency_s}}}};
}

trace of(std::vector<arriving> requests, std::size_t models, double length_s) {
  trace made{.models = {}, .requests = std::move(requests), .length_s = length_s};
  made.models.resize(models, "m");
  return made;
}

simulation_settings loads_of(double load_s) {
  simulation_settings settings;
  settings.costs.bytes_per_s = 100.0 / load_s;
  return settings;
}

simulation_outcome run(trace const& requests, std::vector<simulated_model> const& models,
                       std::string const& policy, simulation_settings const& settings) {
  auto const keeps = make_keeping(policy, {.models = &models,
                                           .requests = &requests,
                                           .costs = settings.costs,
                                           .devices = settings.devices});
  return simulate(requests, models, *keeps, settings);
}

TEST(a_simulation, loads_a_model_for_its_first_request_and_after_its_timeout) {
  auto const requests = of({{1.0, 0.5, 0}, {1.2, 0.5, 0}, {20.0, 0.5, 0}}, 1, 40.0);
  auto const seen = run(requests, models_of(1, 2.7), "fixed:10s", loads_of(2.0));
  auto const all = seen.all();
  EXPECT_EQ(all.loads, 2U);
  EXPECT_EQ(all.cold, 3U);  // the second came while it was loaded
  EXPECT_EQ(all.answered, 3U);
  // 2.5 s and 2.8 s, then released at 14 s, and 2.5 s again.
  EXPECT_NEAR(all.responses_s, 2.5 + 2.8 + 2.5, 1e-9);
  EXPECT_EQ(all.within, 2U);
  EXPECT_NEAR(all.released_s, 1.0 + (20.0 - 14.0) + (40.0 - 32.5), 1e-9);
  EXPECT_NEAR(seen.released_share(), 14.5 / 40.0, 1e-9);
}

TEST(a_simulation, that_begins_warm_never_loads) {
  auto const requests = of({{1.0, 0.5, 0}, {100.0, 0.5, 0}}, 1, 200.0);
  auto const seen = run(requests, models_of(1), "always", loads_of(2.0));
  EXPECT_EQ(seen.all().loads, 0U);
  EXPECT_EQ(seen.released_share(), 0.0);
  EXPECT_NEAR(seen.all().responses_s, 1.0, 1e-9);
}

TEST(a_simulation, lets_others_go_before_a_model_that_is_loaded) {
  auto const requests = of({{0.0, 1.0, 0}, {0.5, 1.0, 1}, {5.0, 1.0, 0}}, 2, 10.0);
  auto settings = loads_of(2.0);
  auto const seen = run(requests, models_of(2), "fixed:10s", settings);
  EXPECT_NEAR(seen.models[0].responses_s, 3.0 + 1.0, 1e-9);
  EXPECT_NEAR(seen.models[1].responses_s, 2.0 + 0.5 + 1.0, 1e-9);  // behind the first's service
}

TEST(a_simulation, computes_in_turn_among_models_and_as_many_at_once_as_it_may) {
  auto const requests = of({{0.0, 1.0, 0}, {0.1, 1.0, 1}, {0.2, 1.0, 0}}, 2, 10.0);
  simulation_settings one, two;
  two.parallel = 2;
  EXPECT_NEAR(run(requests, models_of(2), "always", one).all().responses_s, 1.0 + 1.9 + 2.8, 1e-9);
  // The third waits for its own model, which has one instance.
  EXPECT_NEAR(run(requests, models_of(2), "always", two).all().responses_s, 1.0 + 1.0 + 1.8, 1e-9);
  auto several = models_of(2);
  several[0].instances = 2;
  two.parallel = 3;
  EXPECT_NEAR(run(requests, several, "always", two).all().responses_s, 3.0, 1e-9);
}

TEST(a_simulation, slows_down_those_who_compute_at_once_while_they_do) {
  auto const requests = of({{0.0, 1.0, 0}, {0.5, 1.0, 1}}, 2, 10.0);
  simulation_settings settings;
  settings.parallel = 2;
  settings.slowdown = {1.0, 2.0};
  // The first has half left at 0.5, which takes 1 s; then the second has half left, alone.
  auto const seen = run(requests, models_of(2), "always", settings);
  EXPECT_NEAR(seen.models[0].responses_s, 1.5, 1e-9);
  EXPECT_NEAR(seen.models[1].responses_s, 1.5, 1e-9);
}

TEST(a_simulation, has_those_who_come_during_a_release_wait_for_its_end_and_the_load) {
  auto const requests = of({{0.0, 1.0, 0}, {4.0, 1.0, 0}}, 1, 20.0);
  auto settings = loads_of(2.0);
  settings.release_s = 3.0;
  auto const seen = run(requests, models_of(1), "cold", settings);
  EXPECT_NEAR(seen.all().responses_s, 3.0 + (6.0 - 4.0) + 2.0 + 1.0, 1e-9);
}

TEST(a_simulation, counts_from_when_it_is_told_to) {
  auto const requests = of({{1.0, 0.5, 0}, {12.0, 0.5, 0}}, 1, 20.0);
  auto settings = loads_of(1.0);
  settings.count_from_s = 10.0;
  auto const seen = run(requests, models_of(1), "cold", settings);
  EXPECT_EQ(seen.all().requests, 1U);
  EXPECT_EQ(seen.all().loads, 1U);
  EXPECT_NEAR(seen.released_share(), (2.0 + 6.5) / 10.0, 1e-9);
}

TEST(a_simulation, tells_how_far_it_is) {
  auto const requests = generate("poisson:rate=100", {.length_s = 1000.0});
  std::vector<double> shares;
  simulation_settings settings;
  settings.progress = [&shares](double share) { shares.push_back(share); };
  (void)run(requests, models_of(1), "always", settings);
  ASSERT_GT(shares.size(), 3U);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_LE(shares.back(), 1.0);
}

TEST(a_simulation, refuses_settings_without_meaning) {
  auto const requests = of({{1.0, 0.5, 0}}, 1, 2.0);
  auto models = models_of(1);
  EXPECT_THROW((void)run(requests, models, "cold", {.devices = 0}), error);
  EXPECT_THROW((void)run(requests, models, "cold", {.parallel = 0}), error);
  EXPECT_THROW((void)run(requests, models, "cold", {.slowdown = {1.0, 0.0}}), error);
  models[0].device = 1;
  EXPECT_THROW((void)run(requests, models, "cold", {}), error);
}

TEST(models, are_placed_where_there_is_least_work) {
  auto const requests = of({{0.0, 5.0, 0}, {0.0, 4.0, 1}, {0.0, 3.0, 2}, {0.0, 1.0, 3}}, 5, 1.0);
  EXPECT_EQ(place_models(requests, 2), (std::vector<unsigned>{0, 1, 1, 0, 0}));
  EXPECT_EQ(place_models(requests, 1), (std::vector<unsigned>(5)));
}

TEST(a_time_histogram, has_quantiles_within_two_in_a_hundred) {
  time_histogram times;
  EXPECT_EQ(times.quantile(0.5), 0.0);
  for (int i = 1; i <= 10'000; ++i) {
    times.add(i * 1e-3);
  }
  EXPECT_NEAR(times.quantile(0.5), 5.0, 0.1);
  EXPECT_NEAR(times.quantile(0.99), 9.9, 0.2);
  times.add(1e9);  // longer than anything that it tells apart
  EXPECT_GT(times.quantile(1.0), 1e6);
}

}  // namespace
}  // namespace sluice::simulator
