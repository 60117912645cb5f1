#include "runtime/telemetry/error_table.hpp"

#include <gtest/gtest.h>

#include <set>

namespace sluice::telemetry {
namespace {

TEST(error_table, exit_codes_tell_all_kinds_apart_and_leave_those_of_shells_free) {
  std::set<int> codes;
  // `internal` is the last kind; one without a row would have its code.
  for (int i = 0; i <= static_cast<int>(error_kind::internal); ++i) {
    int const code = exit_code(static_cast<error_kind>(i));
    EXPECT_TRUE(codes.insert(code).second) << to_string(static_cast<error_kind>(i));
    EXPECT_GT(code, 1);
    EXPECT_LT(code, exit_launcher_failed);
  }
}

TEST(error_table, http_statuses_blame_the_right_side) {
  EXPECT_EQ(http_status(error_kind::invalid_argument), 400);
  EXPECT_EQ(http_status(error_kind::not_found), 404);
  EXPECT_EQ(http_status(error_kind::unavailable), 503);
  EXPECT_EQ(http_status(error_kind::deadline_exceeded), 504);
  EXPECT_EQ(http_status(error_kind::model_error), 500);
  EXPECT_EQ(http_status(error_kind::misconfigured), 500);
  EXPECT_EQ(http_status(error_kind::internal), 500);
}

TEST(error_table, a_kind_beyond_the_table_counts_as_internal) {
  EXPECT_EQ(http_status(static_cast<error_kind>(99)), 500);
  EXPECT_EQ(exit_code(static_cast<error_kind>(99)), exit_code(error_kind::internal));
}

}  // namespace
}  // namespace sluice::telemetry
