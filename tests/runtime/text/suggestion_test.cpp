#include "runtime/text/suggestion.hpp"

#include <gtest/gtest.h>

#include <array>

namespace sluice::text {
namespace {

constexpr std::array<std::string_view, 4> keys{"max_body", "port", "host", "request_timeout"};

TEST(suggestion, distance_counts_insertions_deletions_substitutions_and_swaps) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("port", "port"), 0U);
  EXPECT_EQ(edit_distance("prot", "port"), 1U);
  EXPECT_EQ(edit_distance("pot", "port"), 1U);
  EXPECT_EQ(edit_distance("porrt", "port"), 1U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

TEST(suggestion, a_small_slip_is_understood) {
  EXPECT_EQ(nearest("prot", keys), "port");
  EXPECT_EQ(nearest("max-body", keys), "max_body");
  EXPECT_EQ(nearest("MAX_BODY", keys), "max_body");
  EXPECT_EQ(nearest("request_time_out", keys), "request_timeout");
}

TEST(suggestion, another_word_is_not_guessed_at) {
  EXPECT_EQ(nearest("weights", keys), std::nullopt);
  EXPECT_EQ(nearest("p", keys), std::nullopt);
  EXPECT_EQ(nearest(std::string(10'000, 'p'), keys), std::nullopt);
}

TEST(suggestion, without_a_guess_all_words_are_told) {
  EXPECT_EQ(suggestion("prot", keys), R"(did you mean "port"?)");
  EXPECT_EQ(suggestion("weights", keys), "known are max_body, port, host, request_timeout");
}

}  // namespace
}  // namespace sluice::text
