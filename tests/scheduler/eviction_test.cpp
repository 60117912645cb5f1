#include "scheduler/eviction.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "scheduler/model_controller.hpp"

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;
using places = std::vector<std::size_t>;

std::uint64_t bytes_of(std::vector<resident_model> const& models, places const& of) {
  return std::accumulate(of.begin(), of.end(), std::uint64_t{0},
                         [&](auto sum, auto each) { return sum + models[each].bytes; });
}

double loss_of(std::vector<resident_model> const& models, places const& of) {
  return std::accumulate(of.begin(), of.end(), 0.0,
                         [&](auto sum, auto each) { return sum + models[each].loss_per_s; });
}

TEST(eviction, takes_the_model_whose_bytes_cost_least) {
  // Greedy-dual: frequency times cost over size, 4 · 2 s / 8 = 1, 1 · 2 s / 8, 4 · 2 s / 2.
  std::vector<resident_model> const models{{.bytes = 8, .loss_per_s = 8.0},
                                           {.bytes = 8, .loss_per_s = 2.0},
                                           {.bytes = 2, .loss_per_s = 8.0}};
  EXPECT_EQ(models_to_release(models, 8), places{1});
  EXPECT_EQ(models_to_release(models, 10), (places{1, 0}));
  EXPECT_EQ(models_to_release(models, 18), (places{1, 0, 2}));
}

TEST(eviction, takes_none_that_could_stay) {
  std::vector<resident_model> const models{{.bytes = 1, .loss_per_s = 0.01},
                                           {.bytes = 10, .loss_per_s = 1.0}};
  EXPECT_EQ(models_to_release(models, 10), places{1}) << "the small one would not be enough";
  EXPECT_EQ(models_to_release(models, 1), places{0});
}

TEST(eviction, takes_the_longest_idle_of_those_that_cost_alike) {
  std::vector<resident_model> const models{
      {.bytes = 4, .idle = 3s}, {.bytes = 4, .idle = 9s}, {.bytes = 4, .idle = 5s}};
  EXPECT_EQ(models_to_release(models, 4), places{1});
  EXPECT_EQ(models_to_release(models, 5), (places{1, 2}));
}

TEST(eviction, leaves_those_with_requests_alone_where_others_are_enough) {
  std::vector<resident_model> const models{{.bytes = 4, .loss_per_s = 0.0, .has_requests = true},
                                           {.bytes = 4, .loss_per_s = 5.0},
                                           {.bytes = 4, .loss_per_s = 7.0}};
  EXPECT_EQ(models_to_release(models, 4), places{1});
  EXPECT_EQ(models_to_release(models, 8), (places{1, 2}));
  EXPECT_EQ(models_to_release(models, 12), (places{1, 2, 0}));
  std::vector<resident_model> const large{{.bytes = 4, .loss_per_s = 5.0},
                                          {.bytes = 10, .has_requests = true}};
  EXPECT_EQ(models_to_release(large, 8), places{1}) << "the idle one is needless then";
}

TEST(eviction, says_when_all_are_not_enough) {
  std::vector<resident_model> const models{{.bytes = 4}, {.bytes = 0}, {.bytes = 3}};
  EXPECT_EQ(models_to_release(models, 8), places{});
  EXPECT_EQ(models_to_release({}, 1), places{});
  EXPECT_EQ(models_to_release(models, 7), (places{0, 2}));
}

/// The least loss of all sets that are enough.
double optimum(std::vector<resident_model> const& models, std::uint64_t wanted) {
  double best = std::numeric_limits<double>::infinity();
  for (unsigned set = 1; set < 1U << models.size(); ++set) {
    places chosen;
    for (std::size_t i = 0; i < models.size(); ++i) {
      if ((set >> i & 1U) != 0) {
        chosen.push_back(i);
      }
    }
    if (bytes_of(models, chosen) >= wanted) {
      best = std::min(best, loss_of(models, chosen));
    }
  }
  return best;
}

TEST(eviction, costs_at_most_twice_the_least_loss_and_mostly_no_more_than_that) {
  std::mt19937 random{17};
  int optimal = 0;
  constexpr int cases = 2000;
  for (int i = 0; i < cases; ++i) {
    std::vector<resident_model> models(1 + random() % 9);
    for (auto& each : models) {
      each.bytes = 1 + random() % 40;
      each.loss_per_s = static_cast<double>(random() % 1000) / 100.0;
    }
    places all(models.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    auto const wanted = 1 + random() % bytes_of(models, all);
    auto const chosen = models_to_release(models, wanted);
    ASSERT_GE(bytes_of(models, chosen), wanted);
    for (auto const each : chosen) {
      ASSERT_LT(bytes_of(models, chosen) - models[each].bytes, wanted) << "one could stay";
    }
    double const least = optimum(models, wanted);
    double const loss = loss_of(models, chosen);
    ASSERT_LE(loss, 2.0 * least + 1e-9);
    optimal += loss <= least + 1e-9 ? 1 : 0;
  }
  EXPECT_GT(optimal, cases * 8 / 10);
}

TEST(eviction, withstands_numbers_without_sense) {
  std::vector<resident_model> const models{{.bytes = std::numeric_limits<std::uint64_t>::max(),
                                            .loss_per_s = std::numeric_limits<double>::quiet_NaN()},
                                           {.bytes = std::numeric_limits<std::uint64_t>::max(),
                                            .loss_per_s = std::numeric_limits<double>::infinity()},
                                           {.bytes = 5, .loss_per_s = -1.0}};
  EXPECT_EQ(models_to_release(models, 6), places{0});
  constexpr auto most = std::numeric_limits<std::uint64_t>::max();
  std::vector<resident_model> const huge{{.bytes = most - 5}, {.bytes = most - 4}};
  EXPECT_EQ(models_to_release(huge, 1).size(), 1U) << "their sum is more than a number holds";
  EXPECT_EQ(models_to_release(huge, most), (places{0, 1}));
  EXPECT_EQ(models_to_release(models, 0), places{});
}

TEST(eviction, looks_at_few_sets_of_many_models_and_still_pays_at_most_twice) {
  // One byte each but for the last, which costs as much as half of them: any of the others completes what comes before.
  std::vector<resident_model> models(4000, {.bytes = 1, .loss_per_s = 1.0});
  models.push_back({.bytes = 2000, .loss_per_s = 1500.0});
  EXPECT_EQ(models_to_release(models, 2000), places{4000});
  EXPECT_EQ(models_to_release(models, 1000).size(), 1000U);
  places const with_it = models_to_release(models, 5000);
  EXPECT_EQ(with_it.size(), 3001U);
  EXPECT_DOUBLE_EQ(loss_of(models, with_it), 4500.0);
}

/// A request every `gap`, which a cold start answers too late.
model_controller asked_every(seconds gap, seconds load) {
  model_controller model{{.goal = {.latency = 200ms},
                          .service = {.mean = 10ms, .scv = 0.1},
                          .load = {.mean = load, .scv = 0.01}},
                         instant{}};
  instant now{};
  for (; now < instant{600s}; now += gap) {
    (void)model.on_arrival(now);
    model.on_service(now, 10ms, 10ms);
  }
  (void)model.tick(instant{600s});
  return model;
}

TEST(absence, costs_more_the_more_a_model_is_asked_for_and_the_later_its_cold_starts_are) {
  instant const now{600s};
  double const often = asked_every(1s, 1s).absence_loss(now);
  double const rarely = asked_every(20s, 1s).absence_loss(now);
  double const in_time = asked_every(1s, 50ms).absence_loss(now);
  EXPECT_GT(often, 10.0 * rarely);
  EXPECT_GT(often, 10.0 * in_time);
  EXPECT_GT(in_time, 0.0) << "a copy costs something, too";
  EXPECT_LT(asked_every(1s, 1s).absence_loss(now + 600s), 0.1 * often) << "nobody asks any more";
}

}  // namespace
}  // namespace sluice::scheduler
