#include "scheduler/joint_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

using options = std::vector<kept_option>;
using choice = std::vector<std::size_t>;

TEST(choose_together, gives_each_what_loses_least_with_least_memory_where_there_is_enough) {
  std::vector<options> const models{{{8.0, 0.0}, {6.0, 0.0}, {1.0, 0.5}}, {{5.0, 1.0}, {2.0, 1.5}}};
  auto const made = choose_together(models, 11.0);
  EXPECT_EQ(made.options, (choice{1, 0}));
  EXPECT_EQ(made.held_bytes, 11.0);
  EXPECT_EQ(made.loss_per_s, 1.0);
  EXPECT_EQ(made.price, 0.0);
  EXPECT_TRUE(made.fits);
}

TEST(choose_together, takes_first_where_a_byte_costs_least) {
  std::vector<options> const models{{{10.0, 0.0}, {1.0, 0.2}}, {{6.0, 0.0}, {1.0, 0.4}}};
  auto const made = choose_together(models, 8.0);
  EXPECT_EQ(made.options, (choice{1, 0}));
  EXPECT_DOUBLE_EQ(made.price, 0.2 / 9.0);
  EXPECT_EQ(choose_together(models, 3.0).options, (choice{1, 1}));
}

TEST(choose_together, skips_a_step_that_is_dearer_than_the_two_around_it_together) {
  // From 10 to 4 at 0.1 a byte; over 8 the first two bytes would cost 0.25 each.
  std::vector<options> const models{{{10.0, 0.0}, {8.0, 0.5}, {4.0, 0.6}}};
  EXPECT_EQ(choose_together(models, 5.0).options, choice{2});
  EXPECT_EQ(choose_together(models, 9.0).options, choice{1}) << "what is left over is used";
}

TEST(choose_together, leaves_what_is_in_force_only_for_a_noticeable_gain) {
  std::vector<options> const models{{{10.0, 0.0}, {1.0, 0.40}}, {{10.0, 0.0}, {1.0, 0.42}}};
  EXPECT_EQ(choose_together(models, 12.0).options, (choice{1, 0}));
  EXPECT_EQ(choose_together(models, 12.0, choice{0, 1}).options, (choice{0, 1}));
  EXPECT_DOUBLE_EQ(choose_together(models, 12.0, choice{0, 1}).loss_per_s, 0.42);
  EXPECT_EQ(choose_together(models, 10.5, choice{0, 1}).options, (choice{1, 1})) << "does not fit";
  EXPECT_EQ(choose_together(models, 20.0, choice{0, 1}).options, (choice{0, 0}));
  EXPECT_EQ(choose_together(models, 12.0, choice{1, 1}).options, (choice{1, 0}));
  EXPECT_EQ(choose_together(models, 12.0, choice{0}).options, (choice{1, 0})) << "of other models";
  EXPECT_EQ(choose_together(models, 12.0, choice{0, 9}).options, (choice{1, 0}));
}

TEST(choose_together, says_when_not_even_the_least_fits) {
  std::vector<options> const models{{{10.0, 0.0}, {4.0, 0.6}}, {{3.0, 0.1}}};
  auto const made = choose_together(models, 6.0);
  EXPECT_FALSE(made.fits);
  EXPECT_EQ(made.options, (choice{1, 0}));
  EXPECT_TRUE(choose_together({}, 0.0).fits);
}

TEST(choose_together, refuses_what_is_no_amount) {
  std::vector<options> const without{{}};
  EXPECT_THROW((void)choose_together(without, 1.0), std::invalid_argument);
  for (double const wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    std::vector<options> const bytes{{{wrong, 0.0}}}, loss{{{0.0, wrong}}};
    EXPECT_THROW((void)choose_together(bytes, 1.0), std::invalid_argument);
    EXPECT_THROW((void)choose_together(loss, 1.0), std::invalid_argument);
  }
  EXPECT_THROW((void)choose_together({}, -1.0), std::invalid_argument);
  EXPECT_THROW((void)choose_together({}, std::nan("")), std::invalid_argument);
}

/// The least loss of all choices that fit.
double optimum(std::vector<options> const& models, double memory, std::size_t from = 0) {
  if (memory < 0.0) {
    return std::numeric_limits<double>::infinity();
  }
  if (from == models.size()) {
    return 0.0;
  }
  double best = std::numeric_limits<double>::infinity();
  for (auto const& each : models[from]) {
    best = std::min(best, each.loss_per_s + optimum(models, memory - each.held_bytes, from + 1));
  }
  return best;
}

std::vector<options> random_models(std::mt19937_64& random) {
  std::uniform_int_distribution<std::size_t> models(1, 5), count(1, 7);
  std::uniform_int_distribution<int> bytes(0, 64), loss(0, 100);
  std::vector<options> made(models(random));
  for (auto& each : made) {
    each.resize(count(random));
    for (auto& option : each) {
      option = {static_cast<double>(bytes(random)), 0.01 * loss(random)};
    }
  }
  return made;
}

double sum_of(std::vector<options> const& models, choice const& made, double kept_option::*what) {
  double sum = 0.0;
  for (std::size_t m = 0; m < models.size(); ++m) {
    sum += models[m][made[m]].*what;
  }
  return sum;
}

TEST(choose_together, loses_at_most_a_step_more_than_the_best_choice_and_mostly_nothing) {
  std::mt19937_64 random{7};  // NOLINT: the same cases each time
  constexpr int cases = 2000;
  int optimal = 0;
  for (int i = 0; i < cases; ++i) {
    auto const models = random_models(random);
    double least = 0.0, most = 0.0, largest_loss = 0.0;
    for (auto const& each : models) {
      auto const by_bytes = [](auto const& a, auto const& b) {
        return a.held_bytes < b.held_bytes;
      };
      auto const [low, high] = std::minmax_element(each.begin(), each.end(), by_bytes);
      least += low->held_bytes;
      most += high->held_bytes;
      for (auto const& option : each) {
        largest_loss = std::max(largest_loss, option.loss_per_s);
      }
    }
    double const memory =
        std::floor(least + (most - least) * std::generate_canonical<double, 53>(random));
    auto const made = choose_together(models, memory);
    ASSERT_TRUE(made.fits);
    ASSERT_LE(made.held_bytes, memory);
    ASSERT_NEAR(made.held_bytes, sum_of(models, made.options, &kept_option::held_bytes), 1e-9);
    ASSERT_NEAR(made.loss_per_s, sum_of(models, made.options, &kept_option::loss_per_s), 1e-9);
    double const best = optimum(models, memory);
    ASSERT_GE(made.loss_per_s, best - 1e-9);
    ASSERT_LE(made.loss_per_s, best + largest_loss + 1e-9);
    optimal += made.loss_per_s <= best + 1e-9 ? 1 : 0;
  }
  EXPECT_GE(optimal, cases * 8 / 10) << optimal;
}

TEST(choose_together, never_loses_more_where_there_is_more_memory_than_one_step_can_explain) {
  std::mt19937_64 random{11};  // NOLINT: the same cases each time
  for (int i = 0; i < 200; ++i) {
    auto const models = random_models(random);
    double before = std::numeric_limits<double>::infinity();
    for (double memory = 0.0; memory <= 320.0; memory += 8.0) {
      auto const made = choose_together(models, memory);
      if (made.fits) {
        EXPECT_LE(made.loss_per_s, before + 1.0);
        before = std::min(before, made.loss_per_s);
      }
    }
  }
}

TEST(kept_options, lose_nothing_where_they_keep_the_promise) {
  auto const made = decide({.goal = {.percentile = 0.9,
                                     .latency = seconds{0.5},
                                     .attainment = 0.9,
                                     .window = seconds{300.0}},
                            .weight_bytes = 1000,
                            .arrivals_per_s = 0.5,
                            .service = distribution::gamma(seconds{0.1}, 0.0),
                            .load = distribution::gamma(seconds{2.0}, 0.0),
                            .resident_parts = 4});
  auto const found = kept_options_of(made, 1000.0);
  ASSERT_EQ(found.size(), made.candidates.size());
  for (std::size_t i = 0; i < made.candidates.size(); ++i) {
    auto const& each = made.candidates[i];
    EXPECT_NEAR(found[i].held_bytes, 1000.0 * (1.0 - each.released_fraction), 1e-9);
    double const late = std::max(0.0, made.required_share - each.attainment);
    EXPECT_NEAR(found[i].loss_per_s, 0.5 * late / (1.0 - made.required_share), 1e-9);
    EXPECT_TRUE(each.attainment >= made.required_share || !each.will_do);
  }
  // Alone each would take what keeps its promise with least memory.
  std::vector<options> const one{found};
  auto const together = choose_together(one, 1000.0);
  EXPECT_EQ(together.loss_per_s, 0.0);
  EXPECT_LE(together.held_bytes, 1000.0 * (1.0 - made.chosen.released_fraction) + 1e-9);
}

}  // namespace
}  // namespace sluice::scheduler
