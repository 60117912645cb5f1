#include "runtime/simulator/simulation_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace sluice::simulator {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

simulation_row row() {
  simulation_row one{.policy = "fixed:1s", .outcome = {}, .before = {}};
  one.outcome.models.resize(2);
  one.outcome.models[0] = {.requests = 4,
                           .answered = 4,
                           .within = 3,
                           .cold = 1,
                           .loads = 1,
                           .waits_s = 0.4,
                           .responses_s = 1.0,
                           .released_s = 30.0};
  one.outcome.length_s = 120.0;
  one.outcome.released_byte_s = 30.0;
  one.outcome.deployed_byte_s = 240.0;
  one.before = {.in_time = 0.8, .mean_wait_s = 0.09, .by = "M/G/1 with set-up"};
  return one;
}

TEST(a_table, has_a_line_for_each_policy_under_a_head) {
  auto const text = table_of({row(), row()});
  EXPECT_THAT(text, StartsWith("policy    in time %  predicted %"));
  EXPECT_THAT(text, HasSubstr("\nfixed:1s      75.00        80.00"));
  EXPECT_THAT(text, HasSubstr("100.00"));  // ms of waiting
  EXPECT_THAT(text, HasSubstr("M/G/1 with set-up\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
}

TEST(a_table, has_dashes_where_nothing_was_predicted) {
  auto one = row();
  one.before = {};
  EXPECT_THAT(table_of({one}), HasSubstr("75.00            -"));
}

TEST(csv, has_a_line_for_all_and_one_for_each_model) {
  auto const text = csv_of({row()}, {"plain", "a,\"b\""});
  EXPECT_THAT(text, StartsWith("policy,model,requests,"));
  EXPECT_THAT(
      text, HasSubstr("\nfixed:1s,all,4,0,3,1,1,0.75,0.8,0.1,0.25,0.09,0.125,M/G/1 with set-up\n"));
  EXPECT_THAT(text, HasSubstr("\nfixed:1s,plain,4,0,3,1,1,0.75,,0.1,0.25,,0.25,\n"));
  EXPECT_THAT(text, HasSubstr("\nfixed:1s,\"a,\"\"b\"\"\",0,"));
}

}  // namespace
}  // namespace sluice::simulator
