#include "runtime/simulator/simulation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/placing.hpp"
#include "tests/runtime/simulator/refusal.hpp"

namespace sluice::simulator {
namespace {

using scheduler::seconds;
using testing::DoubleNear;
using testing::ElementsAre;
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

/// Never goes by itself; of a model that goes for another one's sake a part stays.
class part_stays final : public keeping {
 public:
  explicit part_stays(double share, double timeout_s = never)
      : share_(share), timeout_s_(timeout_s) {}
  double idle_timeout(model_number /*model*/, double /*idle_since_s*/, double /*now_s*/) override {
    return timeout_s_;
  }
  double resident_share(model_number /*model*/) const override { return share_; }
  void on_load(model_number /*model*/, double /*now_s*/, double load_s, double /*handover_s*/,
               double copied_share) override {
    loads_s.push_back(load_s);
    copied_shares.push_back(copied_share);
  }
  std::vector<double> loads_s, copied_shares;

 private:
  double share_, timeout_s_;
};

TEST(a_simulation, loads_what_has_not_stayed_of_a_model) {
  auto const requests = of({{0.0, 1.0, 0}, {10.0, 1.0, 0}}, 1, 20.0);
  part_stays policy{0.25, 0.0};
  auto const seen = simulate(requests, models_of(1), policy, loads_of(2.0));
  EXPECT_THAT(policy.loads_s, ElementsAre(DoubleNear(2.0, 1e-9), DoubleNear(1.5, 1e-9)));
  EXPECT_THAT(policy.copied_shares, ElementsAre(1.0, 0.75));
  EXPECT_NEAR(seen.all().responses_s, 3.0 + 2.5, 1e-9);
  // Three quarters of it, from 3 to 10 and from 12.5 on.
  EXPECT_NEAR(seen.all().released_s, 0.75 * (7.0 + 7.5), 1e-9);
  EXPECT_NEAR(seen.released_share(), 0.75 * 14.5 / 20.0, 1e-9);
}

TEST(a_simulation, has_the_longest_idle_model_leave_for_one_that_has_no_room) {
  auto const requests = of({{0.0, 1.0, 0}, {4.0, 1.0, 1}, {10.0, 1.0, 2}, {20.0, 1.0, 1}}, 3, 30.0);
  auto settings = loads_of(2.0);
  settings.memory_bytes = {200};
  auto const seen = run(requests, models_of(3), "fixed:1h", settings);
  EXPECT_NEAR(seen.models[2].responses_s, 3.0, 1e-9);
  EXPECT_EQ(seen.models[1].loads, 1U) << "the first one went";
  EXPECT_NEAR(seen.models[0].released_s, 30.0 - 10.0, 1e-9);
}

TEST(a_simulation, has_a_load_wait_until_a_busy_model_may_leave) {
  auto const requests = of({{0.0, 5.0, 0}, {3.0, 1.0, 1}, {3.5, 1.0, 1}, {4.0, 1.0, 0}}, 2, 30.0);
  auto settings = loads_of(2.0);
  settings.memory_bytes = {100};
  auto const seen = run(requests, models_of(2), "fixed:1h", settings);
  EXPECT_EQ(seen.all().answered, 4U);
  EXPECT_EQ(seen.all().loads, 2U) << "the first one's next request was there before it was idle";
  // Behind the first one's two, at 8; then its own load.
  EXPECT_NEAR(seen.models[1].responses_s, (8.0 + 2.0 + 1.0 - 3.0) + (12.0 - 3.5), 1e-9);
}

TEST(a_simulation, has_a_load_wait_for_a_release_that_takes_time) {
  auto const requests = of({{0.0, 1.0, 0}, {10.0, 1.0, 1}}, 2, 30.0);
  auto settings = loads_of(2.0);
  settings.memory_bytes = {150};
  settings.release_s = 3.0;
  auto const seen = run(requests, models_of(2), "fixed:1h", settings);
  EXPECT_NEAR(seen.models[1].responses_s, 3.0 + 2.0 + 1.0, 1e-9);
}

TEST(a_simulation, takes_what_stays_of_a_model_only_where_idle_ones_are_not_enough) {
  auto const requests =
      of({{0.0, 1.0, 0}, {10.0, 1.0, 1}, {20.0, 1.0, 0}, {30.0, 1.0, 1}}, 2, 40.0);
  auto settings = loads_of(2.0);
  settings.memory_bytes = {150};
  part_stays half{0.5};
  auto const seen = simulate(requests, models_of(2), half, settings);
  // Each leaves its half for the other one, and comes back with half a load.
  EXPECT_THAT(half.copied_shares, ElementsAre(1.0, 1.0, 0.5, 0.5));
  EXPECT_NEAR(seen.all().released_s, 10.0 + 0.5 * (10.0 + 10.0 + 10.0), 1e-9);

  settings.memory_bytes = {120};
  part_stays most{0.5};
  (void)simulate(requests, models_of(2), most, settings);
  EXPECT_THAT(most.copied_shares, ElementsAre(1.0, 1.0, 1.0, 1.0));
}

TEST(a_simulation, evicts_nobody_for_a_load_that_nobody_has_asked_for) {
  class loads_the_second final : public keeping {
   public:
    double idle_timeout(model_number, double, double) override { return never; }
    std::optional<double> load_at(model_number model, double /*now_s*/) override {
      return model == 1 ? std::optional{5.0} : std::nullopt;
    }
  };
  auto const requests = of({{0.0, 1.0, 0}, {10.0, 1.0, 0}}, 2, 20.0);
  auto settings = loads_of(2.0);
  settings.memory_bytes = {150};
  loads_the_second policy;
  auto const seen = simulate(requests, models_of(2), policy, settings);
  EXPECT_EQ(seen.models[0].loads, 1U);
  EXPECT_EQ(seen.models[1].loads, 0U);
  settings.memory_bytes = {200};
  loads_the_second again;
  EXPECT_EQ(simulate(requests, models_of(2), again, settings).models[1].loads, 1U);
}

TEST(a_simulation, answers_everybody_however_short_memory_is) {
  auto const requests =
      generate("poisson:rate=4,zipf=1", {.length_s = 2000.0, .models = 9, .service_s = 0.05});
  auto models = models_of(9, 0.5);
  for (std::size_t i = 0; i < models.size(); ++i) {
    models[i].bytes = 40 + 10 * (i % 4);
  }
  for (double const release_s : {0.0, 0.01}) {
    for (auto const* const policy : {"ours", "partial", "always", "cold", "fixed:1s",
                                     "sirius:1s/100B", "wild", "clairvoyant"}) {
      auto settings = loads_of(0.1);
      settings.memory_bytes = {150};
      settings.release_s = release_s;
      settings.parallel = 2;
      auto const keeps = make_keeping(policy, {.models = &models,
                                               .requests = &requests,
                                               .costs = settings.costs,
                                               .memory_bytes = settings.memory_bytes,
                                               .parallel = 2});
      auto const seen = simulate(requests, models, *keeps, settings);
      EXPECT_EQ(seen.all().answered, requests.requests.size()) << policy;
      // The 150 bytes are all that models ever have.
      EXPECT_GE(seen.released_share(), 1.0 - 150.0 / 480.0 - 1e-9) << policy;
    }
  }
}

TEST(a_simulation, refuses_settings_without_meaning) {
  auto const requests = of({{1.0, 0.5, 0}}, 1, 2.0);
  auto models = models_of(1);
  EXPECT_THROW((void)run(requests, models, "cold", {.devices = 0}), error);
  EXPECT_THROW((void)run(requests, models, "cold", {.parallel = 0}), error);
  EXPECT_THROW((void)run(requests, models, "cold", {.slowdown = {1.0, 0.0}}), error);
  EXPECT_THAT(refusal_of([&] { (void)run(requests, models, "cold", {.memory_bytes = {99}}); }),
              HasSubstr("a model of 100 bytes is on a device of 99 bytes"));
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

/// Thirty requests a second, of which twenty can be computed.
simulation_outcome with_retries(unsigned retries) {
  auto const requests =
      generate("poisson:rate=30", {.length_s = 900.0, .service_s = 0.05, .service_scv = 0.0});
  std::vector<simulated_model> const models{
      {.bytes = 100,
       .goal = {.percentile = 0.9, .latency = seconds{0.3}, .window = seconds{100.0}},
       .limits = {seconds{10.0}, scheduler::forever}}};
  auto settings = loads_of(0.1);
  settings.count_from_s = 300.0;
  settings.retries = retries;
  auto const keeps = make_keeping(
      "ours", {.models = &models, .requests = &requests, .costs = settings.costs, .refuse = true});
  return simulate(requests, models, *keeps, settings);
}

TEST(a_simulation, whose_clients_try_again_answers_no_more_than_it_can_and_counts_each_once) {
  auto const once = with_retries(0);
  auto const often = with_retries(4);
  EXPECT_EQ(often.all().requests, once.all().requests);
  EXPECT_EQ(often.all().answered + often.all().refused, often.all().requests);
  EXPECT_GT(once.all().refused, 4000U);
  double const answered = static_cast<double>(once.all().answered);
  EXPECT_NEAR(static_cast<double>(often.all().answered), answered, 0.1 * answered);
  // What came of the first try is as without: nobody is late for those that come again.
  EXPECT_GT(static_cast<double>(once.all().within), 0.9 * answered);
  EXPECT_GT(once.all().within, 10'000U);  // of 12 000 that can be computed
  EXPECT_LT(often.all().within, once.all().within);
  // What is predicted is the share of those who asked, not of how often they did.
  auto const predicted = [](simulation_outcome const& of) {
    return of.all().predicted / static_cast<double>(of.all().predictions);
  };
  EXPECT_NEAR(predicted(often), predicted(once), 0.05);
}

}  // namespace
}  // namespace sluice::simulator
