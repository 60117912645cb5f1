#include "scheduler/joint_keeping.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace sluice::scheduler {
namespace {

using in_force = std::vector<std::optional<prediction>>;

/// With it all the time, or for a tenth of it; the former is what it chooses for itself.
warm_decision deciding(double rate_per_s, double attained_otherwise) {
  warm_decision made;
  made.required_share = 0.9;
  made.long_run_rate_per_s = rate_per_s;
  made.candidates = {
      {.idle_timeout = seconds{1.0}, .attainment = attained_otherwise, .released_fraction = 0.9},
      {.idle_timeout = seconds{60.0}, .attainment = 0.95, .released_fraction = 0.0}};
  made.chosen = made.candidates.back();
  return made;
}

TEST(joint_keeping, leaves_each_its_own_choice_where_there_is_enough) {
  auto const one = deciding(1.0, 0.5), other = deciding(2.0, 0.5);
  joint_keeping shared;
  EXPECT_EQ(shared.share({{&one, 10.0}, {&other, 6.0}}, 16.0).size(), 2U);
  for (auto const& its : shared.share({{&one, 10.0}, {&other, 6.0}}, 16.0)) {
    EXPECT_FALSE(its);
  }
  EXPECT_DOUBLE_EQ(shared.wanted_bytes(), 16.0);
}

TEST(joint_keeping, takes_where_it_costs_least_and_lets_who_misses_its_promise_stay) {
  auto const rare = deciding(1.0, 0.5), often = deciding(5.0, 0.5);
  joint_keeping shared;
  auto const made = shared.share({{&rare, 10.0}, {&often, 10.0}}, 12.0);
  ASSERT_TRUE(made[0] && made[1]);
  EXPECT_EQ(made[0]->attainment, 0.5);
  EXPECT_EQ(made[0]->idle_timeout, forever);
  EXPECT_EQ(made[1]->attainment, 0.95);
  EXPECT_EQ(made[1]->idle_timeout, seconds{60.0});
}

TEST(joint_keeping, releases_one_that_keeps_its_promise_with_less) {
  auto const easy = deciding(1.0, 0.92), hard = deciding(5.0, 0.5);
  joint_keeping shared;
  auto const made = shared.share({{&easy, 10.0}, {&hard, 10.0}}, 12.0);
  ASSERT_TRUE(made[0] && made[1]);
  EXPECT_EQ(made[0]->idle_timeout, seconds{1.0});
}

TEST(joint_keeping, keeps_nobody_beyond_its_longest_idle_time) {
  auto const one = deciding(1.0, 0.5), other = deciding(5.0, 0.5);
  joint_keeping shared;
  auto const made = shared.share({{&one, 10.0, seconds{90.0}}, {&other, 10.0}}, 12.0);
  ASSERT_TRUE(made[0]);
  EXPECT_EQ(made[0]->idle_timeout, seconds{90.0});
}

TEST(joint_keeping, stays_with_what_is_in_force_until_others_take_part) {
  auto const one = deciding(1.0, 0.5), other = deciding(1.02, 0.5), more = deciding(1.01, 0.5);
  joint_keeping shared;
  auto const gives = [](in_force const& made) {
    std::vector<bool> result;
    for (auto const& its : made) {
      result.push_back(its && its->attainment < 0.9);
    }
    return result;
  };
  EXPECT_EQ(gives(shared.share({{&one, 10.0}, {&other, 10.0}}, 12.0)), (std::vector{true, false}));
  EXPECT_EQ(gives(shared.share({{&other, 10.0}, {&one, 10.0}}, 12.0)), (std::vector{true, false}))
      << "a gain of a fiftieth is none";
  EXPECT_EQ(gives(shared.share({{&other, 10.0}, {&one, 10.0}, {&more, 10.0}}, 22.5)),
            (std::vector{false, true, false}));
}

TEST(joint_keeping, leaves_out_who_has_not_decided) {
  auto const one = deciding(1.0, 0.5), other = deciding(5.0, 0.5);
  warm_decision const empty;
  joint_keeping shared;
  auto const made =
      shared.share({{nullptr, 50.0}, {&one, 10.0}, {&empty, 50.0}, {&other, 10.0}}, 12.0);
  EXPECT_FALSE(made[0]);
  EXPECT_TRUE(made[1]);
  EXPECT_FALSE(made[2]);
  EXPECT_TRUE(made[3]);
  EXPECT_DOUBLE_EQ(shared.wanted_bytes(), 20.0);
}

}  // namespace
}  // namespace sluice::scheduler
