#include "runtime/telemetry/error_table.hpp"

#include <gtest/gtest.h>

#include <set>

namespace sluice::telemetry {
namespace {

TEST(error_table, has_a_row_for_every_kind_under_the_kinds_own_name) {
  // `internal` is the last kind.
  ASSERT_EQ(all_error_rows().size(), static_cast<std::size_t>(error_kind::internal) + 1);
  for (std::size_t i = 0; i < all_error_rows().size(); ++i) {
    auto const& entry = all_error_rows()[i];
    EXPECT_EQ(static_cast<std::size_t>(entry.kind), i);
    EXPECT_EQ(entry.name, to_string(entry.kind));
    EXPECT_EQ(http_status(entry.kind), entry.http_status);
    EXPECT_EQ(exit_code(entry.kind), entry.exit_code);
  }
}

TEST(error_table, exit_codes_tell_the_kinds_apart_and_leave_those_of_shells_free) {
  std::set<int> codes;
  for (auto const& entry : all_error_rows()) {
    EXPECT_TRUE(codes.insert(entry.exit_code).second) << entry.name;
    EXPECT_GT(entry.exit_code, 1);
    EXPECT_LT(entry.exit_code, exit_launcher_failed);
  }
}

TEST(error_table, http_statuses_blame_the_right_side) {
  EXPECT_EQ(http_status(error_kind::invalid_argument), 400);
  EXPECT_EQ(http_status(error_kind::not_found), 404);
  EXPECT_EQ(http_status(error_kind::unavailable), 503);
  EXPECT_EQ(http_status(error_kind::deadline_exceeded), 504);
  EXPECT_EQ(http_status(error_kind::internal), 500);
}

TEST(error_table, a_kind_beyond_the_table_counts_as_internal) {
  EXPECT_EQ(http_status(static_cast<error_kind>(99)), 500);
  EXPECT_EQ(exit_code(static_cast<error_kind>(99)), exit_code(error_kind::internal));
}

}  // namespace
}  // namespace sluice::telemetry
