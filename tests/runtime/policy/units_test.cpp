#include "runtime/policy/units.hpp"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::policy {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;
using us = std::chrono::microseconds;

template <class Parse>
std::string refusal(Parse const& parse, std::string const& text) {
  try {
    (void)parse(text);
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument);
    return why.what();
  }
  return "was accepted";
}

TEST(units, bytes_are_binary_and_may_have_a_fraction) {
  EXPECT_EQ(parse_bytes("0B"), 0U);
  EXPECT_EQ(parse_bytes("17B"), 17U);
  EXPECT_EQ(parse_bytes("4KiB"), 4096U);
  EXPECT_EQ(parse_bytes("64 MiB"), 64_MiB);
  EXPECT_EQ(parse_bytes("1.5GiB"), 1536_MiB);
  EXPECT_EQ(parse_bytes("2TiB"), 2048_GiB);
  EXPECT_EQ(parse_bytes("9007199254740993B"), 9007199254740993U) << "beyond a double's precision";
}

TEST(units, durations_are_counted_in_microseconds) {
  EXPECT_EQ(parse_duration("250us"), 250us);
  EXPECT_EQ(parse_duration("1.5ms"), 1500us);
  EXPECT_EQ(parse_duration("5s"), us{5s});
  EXPECT_EQ(parse_duration("10m"), us{10min});
  EXPECT_EQ(parse_duration("24 h"), us{24h});
}

TEST(units, percentages_are_shares) {
  EXPECT_DOUBLE_EQ(parse_percentage("99%"), 0.99);
  EXPECT_DOUBLE_EQ(parse_percentage("99.9 %"), 0.999);
  EXPECT_DOUBLE_EQ(parse_percentage("100%"), 1.0);
}

TEST(units, what_is_written_reads_back_as_the_same) {
  for (auto const bytes : {std::uint64_t{0}, std::uint64_t{1}, 1536_MiB, 64_MiB, 3_GiB + 1}) {
    EXPECT_EQ(parse_bytes(write_bytes(bytes)), bytes);
  }
  for (auto const duration : {us{0}, us{1}, us{1500}, us{90s}, us{10min}, us{36h}}) {
    EXPECT_EQ(parse_duration(write_duration(duration)), duration);
  }
  for (auto const share : {0.01, 0.5, 0.99, 0.999, 1.0}) {
    EXPECT_DOUBLE_EQ(parse_percentage(write_percentage(share)), share);
  }
}

TEST(units, amounts_are_written_in_the_largest_unit_without_a_fraction) {
  EXPECT_EQ(write_bytes(64_MiB), "64MiB");
  EXPECT_EQ(write_bytes(1536_MiB), "1536MiB");
  EXPECT_EQ(write_duration(us{90s}), "90s");
  EXPECT_EQ(write_duration(us{10min}), "10m");
  EXPECT_EQ(write_percentage(0.999), "99.9%");
}

TEST(units, a_refusal_says_what_would_be_right) {
  EXPECT_EQ(refusal(parse_bytes, "40GB"),
            R"("40GB" has the unknown unit "GB"; did you mean 40GiB?)");
  EXPECT_EQ(refusal(parse_bytes, "64"),
            R"("64" has no unit; add B, KiB, MiB, GiB or TiB, for example 64MiB)");
  EXPECT_EQ(
      refusal(parse_bytes, "12 parsecs"),
      R"("12 parsecs" has the unknown unit "parsecs"; use B, KiB, MiB, GiB or TiB, for example 64MiB)");
  EXPECT_EQ(
      refusal(parse_bytes, "99999999TiB"),
      R"("99999999TiB" is too large to be an amount of memory; write less, for example 64MiB)");
  EXPECT_EQ(refusal(parse_duration, "10min"),
            R"("10min" has the unknown unit "min"; did you mean 10m?)");
  EXPECT_EQ(refusal(parse_duration, "soon"),
            R"("soon" is not a duration; write a number and a unit, for example 200ms)");
  EXPECT_EQ(refusal(parse_percentage, "0.99"), R"("0.99" has no unit; add %, for example 99%)");
}

struct form {
  std::string text;
  bool bytes;
  bool duration;
  bool percentage;
};

// The schema's patterns and the parsers are two statements of one rule.
TEST(units, patterns_accept_what_the_parsers_accept) {
  std::vector<form> const forms{{"64MiB", true, false, false}, {"1.5 GiB", true, false, false},
                                {"0B", true, false, false},    {"200ms", false, true, false},
                                {"1.5s", false, true, false},  {"10 m", false, true, false},
                                {"99%", false, false, true},   {"99.9 %", false, false, true},
                                {"", false, false, false},     {"1", false, false, false},
                                {".5s", false, false, false},  {"5.s", false, false, false},
                                {"-1s", false, false, false},  {"+1s", false, false, false},
                                {"1  s", false, false, false}, {" 1s", false, false, false},
                                {"1s ", false, false, false},  {"1e3s", false, false, false},
                                {"1min", false, false, false}, {"1GB", false, false, false},
                                {"1gib", false, false, false}, {"%", false, false, false},
                                {"MiB", false, false, false},  {"1\tMiB", false, false, false}};
  auto matches = [](std::string const& text, std::string_view pattern) {
    return std::regex_match(text, std::regex{std::string{pattern}});
  };
  auto accepts = [](auto const& parse, std::string const& text) {
    return refusal(parse, text) == "was accepted";
  };
  for (auto const& [text, bytes, duration, percentage] : forms) {
    EXPECT_EQ(accepts(parse_bytes, text), bytes) << text;
    EXPECT_EQ(matches(text, bytes_pattern), bytes) << text;
    EXPECT_EQ(accepts(parse_duration, text), duration) << text;
    EXPECT_EQ(matches(text, duration_pattern), duration) << text;
    EXPECT_EQ(accepts(parse_percentage, text), percentage) << text;
    EXPECT_EQ(matches(text, percentage_pattern), percentage) << text;
  }
}

}  // namespace
}  // namespace sluice::policy
