#include "runtime/server/http/json_list.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "runtime/server/http/json_number.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using testing::HasSubstr;

json_number number_in(std::string const& text) {
  json_number number;
  EXPECT_NE(scan_number(text.data(), text.data() + text.size(), number), nullptr) << text;
  EXPECT_EQ(number.text, text);
  return number;
}

/// What the standard library makes of it, rounded once.
template <typename Real>
Real expected(std::string const& text) {
  Real value = 0;
  EXPECT_EQ(std::from_chars(text.data(), text.data() + text.size(), value).ec, std::errc{}) << text;
  return value;
}

template <typename Real>
auto bits_of(Real value) {
  return std::bit_cast<std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>>(value);
}

template <typename Real>
void expect_rounded(std::string const& text) {
  auto const number = number_in(text);
  if constexpr (sizeof(Real) == 4) {
    EXPECT_EQ(bits_of(float_of(number).value()), bits_of(expected<float>(text))) << text;
  } else {
    EXPECT_EQ(bits_of(double_of(number).value()), bits_of(expected<double>(text))) << text;
  }
}

TEST(json_number, rounds_as_the_standard_library_does) {
  std::mt19937_64 random{20240229};
  for (int i = 0; i < 200'000; ++i) {
    auto const magnitude =
        std::ldexp(static_cast<double>(random() >> 11U), static_cast<int>(random() % 180) - 143);
    auto const precision = static_cast<int>(random() % 20);
    std::array<char, 400> text{};
    auto const format =
        random() % 2 == 0 ? std::chars_format::scientific : std::chars_format::fixed;
    auto const end = std::to_chars(text.data(), text.data() + text.size(),
                                   random() % 2 == 0 ? magnitude : -magnitude, format, precision)
                         .ptr;
    std::string const written{text.data(), end};
    if (magnitude < 3e38 && expected<double>(written) != 0) expect_rounded<double>(written);
    if (magnitude > 1e-36 && magnitude < 3e38 && std::fabs(expected<double>(written)) > 1e-36) {
      expect_rounded<float>(written);
    }
  }
}

/// Numbers half-way between two floats, and as little as a decimal digit beside: where a detour over a double rounds twice.
TEST(json_number, rounds_once_between_two_floats) {
  std::mt19937_64 random{20240229};
  for (int i = 0; i < 20'000; ++i) {
    auto const lower =
        std::bit_cast<float>(0x30000000U + static_cast<std::uint32_t>(random() % 0x20000000U));
    auto const upper = std::nextafter(lower, std::numeric_limits<float>::infinity());
    auto const middle = (static_cast<double>(lower) + static_cast<double>(upper)) / 2;
    std::array<char, 400> text{};
    auto const end =
        std::to_chars(text.data(), text.data() + text.size(), middle, std::chars_format::fixed, 80)
            .ptr;
    std::string exact{text.data(), end};
    for (auto const* const tail : {"", "1", "000000000000000000000000000001"}) {
      expect_rounded<float>(exact + tail);
    }
    exact.resize(std::min<std::size_t>(exact.size(), exact.find('.') + 18));
    expect_rounded<float>(exact);
  }
}

TEST(json_number, knows_what_is_a_number_in_json) {
  for (std::string const text : {"0", "-0", "10", "1.5", "0.0", "1e5", "1E+5", "-1.25e-3",
                                 "123456789012345678901234567890", "0.00000000000000000001"}) {
    number_in(text);
  }
  for (std::string const text : {"", "-", "+1", ".5", "1.", "1.e5", "1e", "1e+", "01", "-01",
                                 "00000000000", "inf", "nan", "-inf", "NaN", "x"}) {
    json_number number;
    auto const* const end = scan_number(text.data(), text.data() + text.size(), number);
    EXPECT_EQ(end, nullptr) << text;
  }
  EXPECT_TRUE(number_in("-12").is_integer);
  EXPECT_FALSE(number_in("12.0").is_integer);
  EXPECT_FALSE(number_in("12e0").is_integer);
}

TEST(json_number, what_is_too_small_is_zero_and_what_is_too_large_is_nothing) {
  for (std::string const text : {"1e-60", "0.0000000000000000000000000000000000000000000000001",
                                 "1e-99999999999999999999", "0e99999", "123e-400"}) {
    EXPECT_EQ(float_of(number_in(text)), 0.0F) << text;
  }
  EXPECT_TRUE(std::signbit(float_of(number_in("-1e-60")).value()));
  EXPECT_EQ(double_of(number_in("1e-400")), 0.0);
  for (std::string const text : {"3.5e38", "1e99999999999999999999", "0.0001e50",
                                 "1000000000000000000000000000000000000000"}) {
    EXPECT_FALSE(float_of(number_in(text))) << text;
  }
  EXPECT_FALSE(double_of(number_in("1e309")));
  EXPECT_EQ(double_of(number_in("1e308")), 1e308);
}

json_document document_of(std::string_view text) {
  return {"the body", text};
}

std::vector<float> floats_in(std::string const& text, std::uint64_t wanted) {
  auto const document = document_of(text);
  auto const list = find_list(document, text.data(), 64, "input 'x'");
  EXPECT_EQ(list, text);
  auto const read = read_list(document, list, datatype::fp32, wanted, "input 'x'");
  EXPECT_EQ(read.fault, "");
  std::vector<float> values(read.bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), read.bytes.data(), read.bytes.size());
  return values;
}

TEST(json_list, is_found_and_read) {
  EXPECT_THAT(floats_in("[ 1 ,-2.5,\n\t3e1]", 3), testing::ElementsAre(1, -2.5F, 30));
  EXPECT_THAT(floats_in("[[], [ ]]", 0), testing::IsEmpty());
  EXPECT_THAT(floats_in(R"([[1, 2.5], ["\u0049nfinity", -3e-1]])", 4),
              testing::ElementsAre(1, 2.5F, std::numeric_limits<float>::infinity(), -0.3F));
}

TEST(json_list, ends_where_its_bracket_closes) {
  std::string const text = R"(["]", "\"]", "\\", ["[{"]], "rest": [1]})";
  auto const list = find_list(document_of(text), text.data(), 64, "input 'x'");
  EXPECT_EQ(list, R"(["]", "\"]", "\\", ["[{"]])");
  std::string const deep = "[[[1]]]";
  EXPECT_TRUE(find_list(document_of(deep), deep.data(), 2, "x").empty());
  for (std::string const open : {"[1, 2", "[\"]", "[\"\\\"]", "[[1]", "[1}"}) {
    auto const failure =
        thrown_by([&] { static_cast<void>(find_list(document_of(open), open.data(), 64, "x")); });
    ASSERT_TRUE(failure) << open;
    EXPECT_THAT(failure->what(), HasSubstr("not JSON (byte ")) << open;
  }
}

// A claim is no reason to take memory: a text has room for half as many elements as it has characters.
TEST(json_list, takes_memory_for_what_the_text_can_hold) {
  auto const document = document_of("[1,2]");
  auto const read =
      read_list(document, document.text, datatype::fp64, std::uint64_t{1} << 40U, "x");
  EXPECT_TRUE(read.bytes.empty());
  EXPECT_EQ(read.nesting.size(), 2U);
}

TEST(json_list, a_string_of_escapes_takes_no_longer_than_its_length) {
  std::string const text = "[\"" + std::string(std::size_t{4} << 20U, '\\') + "\"]";
  auto const document = document_of(text);
  auto const list = find_list(document, text.data(), 64, "input 'x'");
  auto const read = read_list(document, list, datatype::bytes, 1, "input 'x'");
  EXPECT_EQ(read.bytes.size(), 4 + (std::size_t{2} << 20U));
}

}  // namespace
}  // namespace sluice::server
