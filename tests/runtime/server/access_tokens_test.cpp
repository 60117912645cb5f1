#include "runtime/server/http/access_tokens.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(access_tokens, one_stands_on_each_line) {
  auto const tokens =
      access_tokens::parse("# those of today\n\n  first \r\nse-c.o_n~d+/== # the other\nlast");
  for (auto const* const right :
       {"Bearer first", "bearer first", "BEARER  first ", "Bearer se-c.o_n~d+/==", "Bearer last"}) {
    EXPECT_TRUE(tokens.allow(right)) << right;
  }
  for (auto const* const wrong :
       {"", "Bearer", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer first1",
        "Bearer first last", "Bearer #", "Bearerfirst", "Bearer those"}) {
    EXPECT_FALSE(tokens.allow(wrong)) << wrong;
  }
}

TEST(access_tokens, the_longest_is_known_by_all_its_characters) {
  std::string const longest(access_tokens::longest, 'x');
  auto const tokens = access_tokens::parse(longest);
  EXPECT_TRUE(tokens.allow("Bearer " + longest));
  EXPECT_FALSE(tokens.allow("Bearer " + longest + "x"));
  EXPECT_FALSE(tokens.allow("Bearer " + longest.substr(1)));
  EXPECT_FALSE(tokens.allow("Bearer " + longest.substr(1) + "y"));
  EXPECT_FALSE(access_tokens::parse("x").allow("Bearer x" + std::string(1, '\0')));
}

TEST(access_tokens, a_wrong_text_is_told_by_its_line_alone) {
  auto const said_of = [](std::string const& text) {
    auto const failure = thrown_by([&] { static_cast<void>(access_tokens::parse(text)); });
    return failure ? failure->what() : std::string{};
  };
  EXPECT_THAT(said_of(""), HasSubstr("no token"));
  EXPECT_THAT(said_of("# none\n \n"), HasSubstr("no token"));
  EXPECT_THAT(said_of("right\nhush hush\n"), AllOf(HasSubstr("line 2"), Not(HasSubstr("hush"))));
  EXPECT_THAT(said_of("h\xC3\xBCsh"), AllOf(HasSubstr("line 1"), Not(HasSubstr("sh\""))));
  EXPECT_THAT(said_of("\n==="), HasSubstr("line 2"));
  EXPECT_THAT(said_of(std::string(access_tokens::longest + 1, 'x')), HasSubstr("257 characters"));
  std::string many;
  for (std::size_t i = 0; i <= access_tokens::most; ++i) many += "t" + std::to_string(i) + "\n";
  EXPECT_THAT(said_of(many), HasSubstr("more than 1024"));
}

}  // namespace
}  // namespace sluice::server
