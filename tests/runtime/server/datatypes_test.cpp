#include "runtime/server/inference/datatypes.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace sluice::server {
namespace {

TEST(datatypes, every_name_leads_back_to_its_type) {
  for (int i = 0; i <= static_cast<int>(datatype::bytes); ++i) {
    auto const type = static_cast<datatype>(i);
    EXPECT_EQ(datatype_from_name(datatype_name(type)), type) << datatype_name(type);
  }
  EXPECT_FALSE(datatype_from_name("FLOAT").has_value());
  EXPECT_FALSE(datatype_from_name("fp32").has_value());
  EXPECT_FALSE(datatype_from_name("").has_value());
}

TEST(datatypes, sizes_are_those_of_the_protocol) {
  EXPECT_EQ(element_size(datatype::boolean), 1U);
  EXPECT_EQ(element_size(datatype::bf16), 2U);
  EXPECT_EQ(element_size(datatype::int32), 4U);
  EXPECT_EQ(element_size(datatype::fp64), 8U);
  EXPECT_EQ(element_size(datatype::bytes), 0U);
}

TEST(datatypes, every_half_survives_the_way_through_double) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    auto const half = static_cast<std::uint16_t>(bits);
    float const value = half_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(half_to_float(half_from_double(value)))) << bits;
    } else {
      EXPECT_EQ(half_from_double(value), half) << bits;
    }
  }
}

TEST(datatypes, every_bfloat16_survives_the_way_through_double) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    auto const small = static_cast<std::uint16_t>(bits);
    float const value = bfloat16_to_float(small);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bfloat16_to_float(bfloat16_from_double(value)))) << bits;
    } else {
      EXPECT_EQ(bfloat16_from_double(value), small) << bits;
    }
  }
}

// The nearest neighbour is found independently: among all halves, by distance, ties to the even
// pattern.
TEST(datatypes, halves_are_rounded_to_nearest_even) {
  auto const middle = [](std::uint16_t bits) {
    return (static_cast<double>(half_to_float(bits)) +
            static_cast<double>(half_to_float(bits + 1))) /
           2;
  };
  for (std::uint16_t bits = 0; bits < 0x7BFF; ++bits) {
    double const tie = middle(bits);
    std::uint16_t const even = (bits & 1U) == 0 ? bits : bits + 1;
    ASSERT_EQ(half_from_double(tie), even) << bits;
    ASSERT_EQ(half_from_double(std::nextafter(tie, 0.0)), bits) << bits;
    ASSERT_EQ(half_from_double(std::nextafter(tie, 1e9)), bits + 1) << bits;
    ASSERT_EQ(half_from_double(-tie), even | 0x8000) << bits;
  }
}

TEST(datatypes, halves_know_their_limits) {
  EXPECT_EQ(half_from_double(1.0), 0x3C00);
  EXPECT_EQ(half_from_double(65504.0), 0x7BFF);
  EXPECT_EQ(half_from_double(65519.999), 0x7BFF);
  EXPECT_EQ(half_from_double(65520.0), 0x7C00);
  EXPECT_EQ(half_from_double(1e300), 0x7C00);
  EXPECT_EQ(half_from_double(-1e300), 0xFC00);
  EXPECT_EQ(half_from_double(0x1p-24), 0x0001);
  EXPECT_EQ(half_from_double(0x1p-25), 0x0000);
  EXPECT_EQ(half_from_double(-0.0), 0x8000);
  EXPECT_EQ(half_from_double(5e-324), 0x0000);
  EXPECT_TRUE(std::isnan(half_to_float(half_from_double(std::nan("")))));
  EXPECT_EQ(half_from_double(std::numeric_limits<double>::infinity()), 0x7C00);
}

// 1 + 2^-8 lies halfway between two bfloat16; with 2^-60 on top it is above, which going through
// float would lose.
TEST(datatypes, bfloat16_is_rounded_once) {
  EXPECT_EQ(bfloat16_from_double(1.0 + 0x1p-8), 0x3F80);
  EXPECT_EQ(bfloat16_from_double(1.0 + 0x1p-8 + 0x1p-50), 0x3F81);
  EXPECT_EQ(bfloat16_from_double(std::numeric_limits<double>::max()), 0x7F80);
  EXPECT_EQ(bfloat16_from_double(0x1.FEp127), 0x7F7F);
}

TEST(datatypes, utf8_is_told_from_other_bytes) {
  using namespace std::string_view_literals;
  for (auto const good : {""sv, "plain"sv, "\xC3\xA9"sv, "\xE2\x82\xAC"sv, "\xF0\x9F\x98\x80"sv,
                          "\xED\x9F\xBF"sv, "\xF4\x8F\xBF\xBF"sv, "a\0b"sv}) {
    EXPECT_TRUE(is_utf8(good)) << good;
  }
  for (auto const bad : {"\x80"sv, "\xC3"sv, "\xC0\x80"sv, "\xC1\xBF"sv, "\xE0\x80\x80"sv,
                         "\xED\xA0\x80"sv, "\xF0\x80\x80\x80"sv, "\xF4\x90\x80\x80"sv,
                         "\xF5\x80\x80\x80"sv, "\xFF"sv, "\xE2\x82"sv, "a\xC3("sv}) {
    EXPECT_FALSE(is_utf8(bad)) << testing::PrintToString(bad);
  }
}

}  // namespace
}  // namespace sluice::server
