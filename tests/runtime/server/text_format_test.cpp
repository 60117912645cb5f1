#include "runtime/server/repository/text_format.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using kind_t = text_value::kind_t;

text_value only_value(std::string const& text) {
  auto tree = parse_text_format(text, "f");
  EXPECT_EQ(tree.fields.size(), 1U) << text;
  EXPECT_EQ(tree.fields.at(0).values.size(), 1U) << text;
  return tree.fields.at(0).values.at(0);
}

TEST(text_format, reads_fields_messages_and_lists) {
  auto const tree = parse_text_format(R"(# a comment
name: "add";  max: -8,
input [ { dims: [ 1, -2 ] }, < dims: 3 dims: 4 > ]
output { type: TYPE_FP32 } output: { }
[a.b/c-d]: 1)",
                                      "f");
  ASSERT_EQ(tree.fields.size(), 6U);
  EXPECT_EQ(tree.fields[0].name, "name");
  EXPECT_EQ(tree.fields[0].values[0].text, "add");
  EXPECT_EQ(tree.fields[0].where.line, 2U);
  EXPECT_EQ(tree.fields[1].where.column, 15U);
  EXPECT_TRUE(tree.fields[1].values[0].negative);
  EXPECT_EQ(tree.fields[1].values[0].magnitude, 8U);
  ASSERT_TRUE(tree.fields[2].list);
  ASSERT_EQ(tree.fields[2].values.size(), 2U);
  EXPECT_EQ(tree.fields[2].values[0].fields[0].values[1].magnitude, 2U);
  EXPECT_EQ(tree.fields[2].values[1].fields.size(), 2U);
  EXPECT_EQ(tree.fields[3].values[0].fields[0].values[0].kind, kind_t::identifier);
  EXPECT_EQ(tree.fields[3].values[0].fields[0].values[0].text, "TYPE_FP32");
  EXPECT_TRUE(tree.fields[4].values[0].fields.empty());
  EXPECT_EQ(tree.fields[5].name, "[a.b/c-d]");
}

TEST(text_format, an_empty_file_is_an_empty_message) {
  EXPECT_TRUE(parse_text_format("", "f").fields.empty());
  EXPECT_TRUE(parse_text_format(" \n# nothing", "f").fields.empty());
  EXPECT_TRUE(parse_text_format("\xEF\xBB\xBF", "f").fields.empty());
}

TEST(text_format, reads_numbers_in_all_their_forms) {
  EXPECT_EQ(only_value("a: 0x1F").magnitude, 31U);
  EXPECT_EQ(only_value("a: 017").magnitude, 15U);
  EXPECT_EQ(only_value("a: 0").magnitude, 0U);
  EXPECT_EQ(only_value("a: 18446744073709551615").magnitude, 18446744073709551615U);
  EXPECT_EQ(only_value("a: - 5").negative, true);
  EXPECT_EQ(only_value("a: 1.5").real, 1.5);
  EXPECT_EQ(only_value("a: .5f").real, 0.5);
  EXPECT_EQ(only_value("a: -1e-3").real, -0.001);
  EXPECT_EQ(only_value("a: 10f").kind, kind_t::real);
  EXPECT_TRUE(std::isinf(only_value("a: -inf").real));
  EXPECT_TRUE(std::isnan(only_value("a: -nan").real));
}

TEST(text_format, resolves_escapes_and_joins_adjacent_strings) {
  EXPECT_EQ(only_value(R"(a: "x\n\t\"\\" 'y"\'')").text, "x\n\t\"\\y\"'");
  EXPECT_EQ(only_value(R"(a: "\x41\102\u00e9\U0001F600")").text, "AB\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_EQ(only_value("a: '\xC3\xA9'").text, "\xC3\xA9");
}

TEST(text_format, faults_name_their_place) {
  struct row {
    std::string text;
    std::string place;
    std::string says;
  };
  std::string deep = "a";
  for (int i = 0; i < 100; ++i) deep += "{a";
  std::vector<row> const rows{
      {"a", "f:1:2: ", "':' or '{'"},
      {"a:", "f:1:3: ", "the end of the file"},
      {"a 5", "f:1:3: ", "':'"},
      {"a: 1\n  b: }", "f:2:6: ", "'}'"},
      {"a {\n b: 1", "f:1:3: ", "never closed"},
      {"a < b: 1 }", "f:1:10: ", "'}'"},
      {"}", "f:1:1: ", "the name of a field"},
      {"5: 1", "f:1:1: ", "'5'"},
      {"a: [1, 2", "f:1:4: ", "never closed"},
      {"a: [1,", "f:1:4: ", "never closed"},
      {"a: [1 2]", "f:1:7: ", "','"},
      {"a: [1,]", "f:1:7: ", "']'"},
      {"a: \"x", "f:1:4: ", "not closed"},
      {"a: \"x\ny\"", "f:1:4: ", "not closed"},
      {"a: \"\\q\"", "f:1:5: ", "escape"},
      {"a: \"\\", "f:1:5: ", "escape"},
      {"a: \"\\xg\"", "f:1:5: ", "hexadecimal"},
      {"a: \"\\777\"", "f:1:5: ", "\\377"},
      {"a: \"\\ud800\"", "f:1:5: ", "hexadecimal"},
      {"a: \"\\u12\"", "f:1:5: ", "4 hexadecimal"},
      {"a: \"\\xFF\"", "f:1:4: ", "UTF-8"},
      {"a: 08", "f:1:4: ", "'08'"},
      {"a: 10foo", "f:1:4: ", "'10foo'"},
      {"a: 0xg", "f:1:4: ", "'0xg'"},
      {"a: 1.2.3", "f:1:4: ", "'1.2.3'"},
      {"a: --1", "f:1:4: ", "number"},
      {"a: -word", "f:1:4: ", "'word'"},
      {"a: 18446744073709551616", "f:1:4: ", "64 bits"},
      {"a: -9223372036854775809", "f:1:4: ", "64 bits"},
      {"[]: 1", "f:1:1: ", "extension"},
      {"[a: 1", "f:1:1: ", "extension"},
      {std::string{"a: \0", 4}, "f:1:4: ", "0x00"},
      {"a: \xFF", "f:1:4: ", "0xff"},
      {deep, "f:1:", "deeper than 64"},
  };
  for (auto const& each : rows) {
    auto const failure = thrown_by([&] { static_cast<void>(parse_text_format(each.text, "f")); });
    ASSERT_TRUE(failure.has_value()) << each.text;
    EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
    EXPECT_THAT(failure->what(), StartsWith(each.place)) << each.text;
    EXPECT_THAT(failure->what(), HasSubstr(each.says)) << each.text;
  }
}

}  // namespace
}  // namespace sluice::server
