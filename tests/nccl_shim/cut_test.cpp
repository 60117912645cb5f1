/// The cut: numbers are granted when all have arrived, and a pause ends them for all at the same one.
#include "nccl_shim/agreement/cut.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "tests/nccl_shim/places.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;
using testing::everywhere;
using testing::in;
using testing::make_place;
using testing::name_of_case;
using testing::place;
using testing::place_kind;

constexpr numbered_call reduce{1, 7, 100, 0};

/// A rank's words, between whose looks at the word and at what is wrong something happens, once; or before it asks
/// where all have arrived.
class slow_words final : public cut_words {
 public:
  explicit slow_words(cut_words& behind) : behind_{behind} {}
  void happens(std::function<void()> what) { happens_ = std::move(what); }
  void happens_before_arrivals(std::function<void()> what) { before_arrivals_ = std::move(what); }

  [[nodiscard]] view look() noexcept override {
    view seen = behind_.look();
    if (auto const what = std::exchange(happens_, nullptr)) {
      what();
      std::uint64_t const word = seen.word;
      seen = behind_.look();
      seen.word = word;
    }
    return seen;
  }
  [[nodiscard]] bool exchange(std::uint64_t& seen, std::uint64_t made) noexcept override {
    return behind_.exchange(seen, made);
  }
  void arrive(std::uint64_t at, numbered_call const& what) noexcept override {
    behind_.arrive(at, what);
  }
  void arrivals(std::span<std::uint64_t> of_ranks) noexcept override {
    if (auto const what = std::exchange(before_arrivals_, nullptr)) {
      what();
    }
    behind_.arrivals(of_ranks);
  }
  [[nodiscard]] numbered_call call_of(unsigned rank, std::uint64_t number) noexcept override {
    return behind_.call_of(rank, number);
  }
  [[nodiscard]] glance look_at_all(std::uint64_t at) noexcept override {
    return behind_.look_at_all(at);
  }
  [[nodiscard]] bool differs(unsigned neighbour, std::uint64_t number) noexcept override {
    return behind_.differs(neighbour, number);
  }
  void launched(std::uint64_t number) noexcept override { behind_.launched(number); }
  [[nodiscard]] std::uint64_t launched() noexcept override { return behind_.launched(); }
  void lose(unsigned rank) noexcept override { behind_.lose(rank); }
  void differ(std::uint64_t differ) noexcept override { behind_.differ(differ); }
  [[nodiscard]] std::uint32_t turn() noexcept override { return behind_.turn(); }
  void notify() noexcept override { behind_.notify(); }
  void wait(std::uint32_t seen, std::chrono::nanoseconds waited,
            std::chrono::nanoseconds at_most) noexcept override {
    behind_.wait(seen, waited, at_most);
  }
  [[nodiscard]] std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept override {
    return behind_.between_looks(waited);
  }

 private:
  cut_words& behind_;
  std::function<void()> happens_;
  std::function<void()> before_arrivals_;
};

class two_ranks : public ::testing::TestWithParam<place_kind> {
 protected:
  [[nodiscard]] static outcome now(cut& of) { return of.await(in(0ns)); }

  std::unique_ptr<place> shared = make_place(GetParam());
  std::unique_ptr<cut_words> words_of_first = shared->words_of(0, 2);
  std::unique_ptr<cut_words> words_of_second = shared->words_of(1, 2);
  cut first{*words_of_first, 0, 2};
  cut second{*words_of_second, 1, 2};
};

/// Of whom one needs that both are asked.
class two_ranks_that_agree : public two_ranks {
 protected:
  two_ranks_that_agree() { first.need(true); }
};

TEST_P(two_ranks, nobody_waits_while_nobody_needs_it) {
  for (int i = 0; i < 5; ++i) {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks, the_first_that_needs_it_owes_what_the_other_has_launched) {
  for (int i = 0; i < 3; ++i) {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
  }
  second.need(true);
  EXPECT_EQ(second.resolve(in(0ns)), outcome::late);
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  for (int i = 0; i < 3; ++i) {
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  EXPECT_EQ(second.resolve(in(0ns)), outcome::granted);
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  EXPECT_EQ(now(first), outcome::granted);
}

TEST_P(two_ranks, who_waits_goes_on_when_nobody_needs_it_any_more) {
  first.need(true);
  second.need(true);
  first.arrive(reduce);
  first.need(false);
  EXPECT_EQ(now(first), outcome::late);  // the other one does
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  shared->await_sleeper();
  second.need(false);
}

TEST_P(two_ranks, calls_that_differ_are_found_by_the_later_rank_where_nobody_waits) {
  numbered_call const other{2, 7, 100, 0};
  for (int i = 0; i < 20; ++i) {
    first.arrive(i == 5 ? other : reduce);
    first.launched();
  }
  for (int i = 0; i < 5; ++i) {
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 6U);
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
}

TEST_P(two_ranks, calls_that_differ_are_found_among_those_that_are_owed) {
  numbered_call const other{2, 7, 100, 0};
  first.arrive(other);
  EXPECT_EQ(now(first), outcome::granted);
  first.launched();
  second.need(true);
  second.arrive(reduce);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
}

/// The first of them is the first that needs it, and slow to grant what others have launched.
class two_ranks_of_whom_one_catches_up : public two_ranks {
 protected:
  void need_while(std::function<void()> const& happens) {
    slow.happens_before_arrivals(happens);
    early.need(true);
  }

  slow_words slow{*words_of_first};
  cut early{slow, 0, 2};
};

TEST_P(two_ranks_of_whom_one_catches_up, what_another_waits_with_is_not_owed) {
  need_while([this] {
    second.need(true);
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::late);
  });
  EXPECT_EQ(now(second), outcome::late);
  EXPECT_EQ(early.pause(false), 0U);
  early.resume();
  early.arrive(reduce);
  EXPECT_EQ(now(early), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_of_whom_one_catches_up, what_it_waits_with_itself_is_not_owed_by_others) {
  need_while([this] {
    early.arrive(reduce);
    EXPECT_EQ(now(early), outcome::late);
  });
  second.need(true);
  EXPECT_EQ(second.resolve(in(0ns)), outcome::granted);
  EXPECT_EQ(now(early), outcome::late);
  second.arrive(reduce);
  EXPECT_EQ(now(early), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_of_whom_one_catches_up, what_another_has_launched_is_compared_by_who_waited) {
  numbered_call const other{2, 7, 100, 0};
  early.arrive(other);
  EXPECT_EQ(now(early), outcome::granted);
  early.launched();
  need_while([this] {
    second.need(true);
    second.arrive(reduce);
  });
  EXPECT_EQ(second.pause(false), 1U);  // whoever pauses is told, not whoever waits
  second.resume();
  second.launched();
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
}

TEST_P(two_ranks_of_whom_one_catches_up, a_new_epoch_drops_what_waits) {
  need_while([this] {
    second.need(true);
    second.arrive(reduce);
    second.begin_epoch();
    EXPECT_EQ(now(second), outcome::dropped);
    EXPECT_EQ(second.number(), 0U);
  });
  second.arrive(reduce);
  early.follow(early.epoch());
  early.arrive(reduce);
  EXPECT_EQ(now(early), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

class two_ranks_in_memory : public two_ranks {};

TEST_P(two_ranks_in_memory, what_nobody_needs_to_be_asked_about_is_passed_in_one_step) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(first.pass(reduce), passing::passed);
    first.launched();
  }
  EXPECT_EQ(first.number(), 3U);
  second.need(true);  // it has not launched them yet
  EXPECT_EQ(first.pass(reduce), passing::refused);
  EXPECT_EQ(first.number(), 3U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(second.pass(reduce), passing::refused);
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  EXPECT_EQ(now(first), outcome::granted);
}

TEST_P(two_ranks_in_memory, what_is_passed_belongs_to_the_epoch_that_there_is) {
  first.begin_epoch();
  EXPECT_EQ(first.pass(reduce), passing::passed);
  second.need(true);
  second.follow(second.epoch());
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  first.arrive(reduce);  // in the same epoch
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_in_memory, a_call_that_differs_from_a_neighbours_is_arrived_at_but_not_passed) {
  numbered_call const other{2, 7, 100, 0};
  EXPECT_EQ(first.pass(other), passing::passed);
  first.launched();
  EXPECT_EQ(second.pass(reduce), passing::unclear);
  EXPECT_EQ(second.number(), 1U);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
  EXPECT_EQ(first.pass(other), passing::refused);
}

TEST_P(two_ranks_in_memory, nothing_is_passed_when_a_rank_has_died) {
  second.declare_lost(0);
  EXPECT_EQ(second.pass(reduce), passing::refused);
  EXPECT_EQ(second.number(), 0U);
}

TEST(cut_word, is_packed_and_unpacked) {
  cut_word const word{0x1ff, true, 64, 64, (std::uint64_t{1} << 40U) - 1};
  EXPECT_EQ(cut_word::unpack(word.pack()), word);
  auto next = word;
  next.next_epoch();
  EXPECT_EQ(next.epoch, 0);
}

TEST_P(two_ranks_that_agree, a_number_is_granted_when_all_have_arrived) {
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(first.number(), 2U);
  EXPECT_EQ(now(first), outcome::late);
  EXPECT_EQ(now(second), outcome::granted);  // still the first
}

TEST_P(two_ranks_that_agree, a_pause_ends_the_grants_and_owes_what_was_granted) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(first.pause(false), 1U);
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::late);
  EXPECT_EQ(now(first), outcome::granted);
  first.launched();
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::granted);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  EXPECT_EQ(second.pause(false), 1U);
  first.resume();
  EXPECT_EQ(now(first), outcome::late);  // the other one pauses yet
  second.resume();
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_that_agree,
       a_new_epoch_drops_what_was_not_granted_and_numbers_go_on_from_the_cut) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(second.pause(true), 1U);
  EXPECT_EQ(now(first), outcome::granted);  // that is owed
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::dropped);
  EXPECT_EQ(now(second), outcome::dropped);
  second.resume();
  first.arrive(reduce);
  EXPECT_EQ(first.number(), 2U);
  EXPECT_EQ(now(first), outcome::late);
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_that_agree, an_arrival_of_an_earlier_epoch_does_not_count) {
  first.arrive(reduce);
  EXPECT_EQ(second.pause(true), 0U);
  second.resume();
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::dropped);  // it did not know yet
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  EXPECT_EQ(now(first), outcome::dropped);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_that_agree, calls_that_differ_are_named_and_end_all_waits) {
  numbered_call const other{2, 7, 100, 0};
  first.arrive(reduce);
  second.arrive(other);
  EXPECT_EQ(now(first), outcome::differs);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = first.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->ranks, (std::array{0U, 1U}));
  EXPECT_EQ(found->calls, (std::array{reduce, other}));
}

TEST_P(two_ranks_that_agree,
       a_rank_that_ends_since_calls_differ_has_the_other_hear_of_the_difference) {
  first.arrive(reduce);
  second.arrive({2, 7, 100, 0});
  EXPECT_EQ(now(first), outcome::differs);
  second.declare_lost(0);
  EXPECT_EQ(now(second), outcome::differs);
}

TEST_P(two_ranks_that_agree, a_death_ends_all_waits_but_those_for_what_is_granted) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(first.lost(), std::nullopt);
  first.declare_lost(1);
  EXPECT_EQ(second.lost(), 1U);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::lost);
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::lost);
}

TEST_P(two_ranks_that_agree, what_was_granted_before_a_death_is_launched_by_who_sees_both_at_once) {
  slow_words slow{*words_of_second};
  cut late{slow, 1, 2};
  late.arrive(reduce);
  slow.happens([this] {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
    first.declare_lost(0);
  });
  EXPECT_EQ(now(late), outcome::granted);
  late.launched();
  late.arrive(reduce);
  EXPECT_EQ(now(late), outcome::lost);
}

TEST_P(two_ranks_that_agree, who_sleeps_is_woken) {
  first.arrive(reduce);
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  shared->await_sleeper();
  second.arrive(reduce);
}

INSTANTIATE_TEST_SUITE_P(words, two_ranks, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, two_ranks_that_agree, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, two_ranks_of_whom_one_catches_up, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, two_ranks_in_memory, ::testing::Values(place_kind::memory),
                         name_of_case);

}  // namespace
}  // namespace sluice::nccl_shim
