#include "memhandover/base/numbers.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace sluice {
namespace {

TEST(numbers, are_all_of_a_text) {
  EXPECT_EQ(parse_number<int>("12"), 12);
  EXPECT_EQ(parse_number<int>("-12"), -12);
  EXPECT_EQ(parse_number<std::uint64_t>("18446744073709551615"),
            std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(parse_number<double>("12.5"), 12.5);
  for (auto const* const text : {"", " ", "12 ", " 12", "12MiB", "+12", "0x10", "twelve", "1e3"}) {
    EXPECT_FALSE(parse_number<int>(text)) << text;
  }
}

TEST(numbers, are_within_their_type) {
  EXPECT_FALSE(parse_number<std::uint64_t>("18446744073709551616"));
  EXPECT_FALSE(parse_number<std::uint32_t>("-1"));
  EXPECT_FALSE(parse_number<int>("2147483648"));
}

}  // namespace
}  // namespace sluice
