#include "memhandover/base/shared_text.hpp"

#include <gtest/gtest.h>

namespace sluice::memhandover {
namespace {

TEST(shared_text, is_cut_between_characters) {
  EXPECT_EQ(cut_text("model", 5), "model");
  EXPECT_EQ(cut_text("model", 3), "mod");
  EXPECT_EQ(cut_text("größe", 3), "gr");
  EXPECT_EQ(cut_text("größe", 4), "grö");
  EXPECT_EQ(cut_text("a€", 3), "a");
  EXPECT_EQ(cut_text("𝄞𝄞", 7), "𝄞");
  EXPECT_EQ(cut_text("𝄞", 3), "");
  EXPECT_EQ(cut_text("x", 0), "");
}

TEST(shared_text, ends_at_its_first_zero_byte) {
  EXPECT_EQ(cut_text(std::string_view{"ab\0cd", 5}, 47), "ab");
}

TEST(shared_text, that_is_no_text_is_cut_all_the_same) {
  EXPECT_EQ(cut_text("\xff\xff\xff\xff\xff\xff", 4).size(), 4U);
}

TEST(shared_text, shows_characters_and_nothing_that_a_terminal_or_a_message_chokes_on) {
  EXPECT_EQ(readable_text("größe € 𝄞"), "größe € 𝄞");
  EXPECT_EQ(readable_text("a\x1b[31m\n\x7f"), "a?[31m??");
  EXPECT_EQ(readable_text("\xc2\x9b\xc2\xa0"), "?\xc2\xa0");
  EXPECT_EQ(readable_text("a\xc3"), "a?");
  EXPECT_EQ(readable_text("\xe2\x82z"), "??z");
}

TEST(shared_text, knows_what_only_looks_like_a_character) {
  EXPECT_EQ(readable_text("\xc0\x80"), "??") << "longer than need be";
  EXPECT_EQ(readable_text("\xe0\x80\x80"), "???") << "longer than need be";
  EXPECT_EQ(readable_text("\xed\xa0\x80"), "???") << "half of a pair";
  EXPECT_EQ(readable_text("\xf4\x90\x80\x80"), "????") << "beyond the last one";
}

}  // namespace
}  // namespace sluice::memhandover
