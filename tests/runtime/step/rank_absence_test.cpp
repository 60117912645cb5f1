#include "runtime/step/rank_absence.hpp"

#include <gtest/gtest.h>

namespace sluice::step {
namespace {

using namespace std::chrono_literals;

TEST(longest_absence_of, a_rank_is_half_of_what_collectives_wait) {
  EXPECT_EQ(longest_absence("2", ""), 5min);
  EXPECT_EQ(longest_absence("64", "90"), 45s);
  EXPECT_EQ(longest_absence("2", "1"), 500ms);
  EXPECT_EQ(longest_absence("2", "86400"), 12h);
}

TEST(longest_absence_of, a_job_of_one_process_has_no_bound) {
  for (auto const* const ranks : {"", "1", "0", "-3", "two", "2x"}) {
    EXPECT_EQ(longest_absence(ranks, "90"), std::nullopt) << ranks;
  }
}

TEST(longest_absence_of, a_rank_whose_timeout_is_no_number_is_half_of_the_usual_one) {
  for (auto const* const timeout : {"0", "-1", "10m", "86401", "1e3", "99999999999999999999"}) {
    EXPECT_EQ(longest_absence("2", timeout), 5min) << timeout;
  }
}

}  // namespace
}  // namespace sluice::step
