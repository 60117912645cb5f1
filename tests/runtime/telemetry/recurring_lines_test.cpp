#include "runtime/telemetry/recurring_lines.hpp"

#include <gtest/gtest.h>

#include <string>

namespace sluice::telemetry {
namespace {

using namespace std::chrono_literals;

class recurring : public testing::Test {
 protected:
  std::optional<recurring_lines::line> at(std::chrono::seconds when, std::string const& text) {
    return lines_.on(text, recurring_lines::clock::time_point{} + when);
  }
  recurring_lines lines_;
};

TEST_F(recurring, a_text_has_a_line_at_once_and_then_one_that_counts_it) {
  auto const first = at(0s, "a");
  ASSERT_TRUE(first);
  EXPECT_EQ(first->repeated, 0U);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_FALSE(at(1s, "a")) << i;
  }
  auto const again = at(60s, "a");
  ASSERT_TRUE(again);
  EXPECT_EQ(again->repeated, 1000U);
  EXPECT_EQ(again->others, 0U);
  EXPECT_FALSE(at(179s, "a")) << "twice as long until the next";
  EXPECT_EQ(at(180s, "a")->repeated, 1U);
}

TEST_F(recurring, texts_have_lines_of_their_own) {
  EXPECT_TRUE(at(0s, "a"));
  EXPECT_TRUE(at(0s, "b"));
  EXPECT_FALSE(at(0s, "a"));
  EXPECT_FALSE(at(0s, "b"));
}

TEST_F(recurring, the_pause_between_two_lines_of_a_text_ends_at_its_longest) {
  int lines = 0;
  for (auto now = 0s; now < 24h; now += 10s) {
    lines += at(now, "a") ? 1 : 0;
  }
  EXPECT_EQ(lines, 1 + 6 + 22) << "at 0, 1, 3, 7, 15, 31 and 63 minutes, then each hour";
}

TEST_F(recurring, texts_that_are_always_new_are_counted_where_they_are_too_many) {
  int lines = 0;
  std::uint64_t others = 0;
  for (int i = 0; i <= 3600; ++i) {
    if (auto const due = at(std::chrono::seconds{i}, std::to_string(i))) {
      ++lines;
      others += due->others;
    }
  }
  EXPECT_EQ(lines, 16 + 60);
  EXPECT_EQ(others, 3601U - 16 - 60) << "none is lost from the count";
}

TEST_F(recurring, a_text_that_had_no_line_has_one_when_there_is_room) {
  for (std::size_t i = 0; i < recurring_lines::most_at_once; ++i) {
    ASSERT_TRUE(at(0s, std::to_string(i)));
  }
  EXPECT_FALSE(at(0s, "late"));
  EXPECT_FALSE(at(59s, "late"));
  auto const due = at(60s, "late");
  ASSERT_TRUE(due);
  EXPECT_EQ(due->repeated, 0U);
  EXPECT_EQ(due->others, 2U);
}

TEST_F(recurring, a_clock_that_stands_still_gives_no_more_lines) {
  int lines = 0;
  for (int i = 0; i < 10'000; ++i) {
    lines += at(5s, std::to_string(i % 100)) ? 1 : 0;
  }
  EXPECT_EQ(lines, 16);
}

}  // namespace
}  // namespace sluice::telemetry
