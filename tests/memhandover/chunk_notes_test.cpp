#include "memhandover/ledger/chunk_notes.hpp"

#include <gtest/gtest.h>

#include <array>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

class chunk_notes_test : public testing::Test {
 protected:
  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, 100});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_only};
};

TEST_F(chunk_notes_test, are_read_as_they_were_said_last) {
  EXPECT_EQ(chunk_note(view_, 3, 7), "");
  chunk_notes notes{view_, 3};
  notes.say(std::array{7U, 99U}, "arena");
  notes.say(std::array{8U}, "persistent");
  notes.say(std::array{99U}, "persistent");
  EXPECT_EQ(chunk_note(view_, 3, 7), "arena");
  EXPECT_EQ(chunk_note(view_, 3, 8), "persistent");
  EXPECT_EQ(chunk_note(view_, 3, 99), "persistent");
  EXPECT_EQ(chunk_note(view_, 4, 7), "") << "another client's";
}

TEST_F(chunk_notes_test, of_a_slots_last_owner_are_forgotten) {
  chunk_notes{view_, 0}.say(std::array{1U}, "old");
  chunk_notes notes{view_, 0};
  EXPECT_EQ(chunk_note(view_, 0, 1), "");
  notes.say(std::array{2U}, "new");
  EXPECT_EQ(chunk_note(view_, 0, 2), "new");
}

TEST_F(chunk_notes_test, that_are_too_long_are_cut_and_chunks_that_do_not_exist_left_alone) {
  chunk_notes notes{view_, 0};
  notes.say(std::array{100U, 0U, 4'000'000'000U}, std::string(200, 'x'));
  EXPECT_EQ(chunk_note(view_, 0, 0), std::string(47, 'x'));
}

TEST_F(chunk_notes_test, are_cut_between_characters) {
  chunk_notes notes{view_, 0};
  notes.say(std::array{0U}, std::string(46, 'x') + "ö");
  EXPECT_EQ(chunk_note(view_, 0, 0), std::string(46, 'x'));
}

TEST_F(chunk_notes_test, of_too_many_different_texts_say_nothing) {
  chunk_notes notes{view_, 0};
  for (std::uint32_t i = 0; i < max_note_texts; ++i) {
    notes.say(std::array{0U}, "model " + std::to_string(i));
    ASSERT_EQ(chunk_note(view_, 0, 0), "model " + std::to_string(i));
  }
  notes.say(std::array{0U}, "one more");
  EXPECT_EQ(chunk_note(view_, 0, 0), "");
  notes.say(std::array{0U}, "model 0");
  EXPECT_EQ(chunk_note(view_, 0, 0), "model 0");
}

TEST_F(chunk_notes_test, that_a_damaged_mailbox_holds_are_no_text_of_another_place) {
  view_.chunk_notes(0)[5].store(0xffff);
  EXPECT_EQ(chunk_note(view_, 0, 5), "");
  std::fill_n(view_.note_texts(0)[0].text, sizeof(note_text::text), 'y');
  view_.chunk_notes(0)[5].store(1);
  EXPECT_EQ(chunk_note(view_, 0, 5), std::string(sizeof(note_text::text), 'y'));
}

}  // namespace
}  // namespace sluice::memhandover
