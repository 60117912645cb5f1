#include "memhandover/ledger/host_copies.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr std::uint32_t slots = 4;
constexpr std::uint16_t job = copy_holder(0, 3);
constexpr std::uint16_t other = copy_holder(1, 3);

class host_copies_test : public testing::Test {
 protected:
  std::array<std::atomic<std::uint64_t>, slots> words_{};
  host_copies copies_{words_};

  [[nodiscard]] std::uint32_t count_of(std::uint16_t holder) const {
    std::uint32_t count = 0;
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      auto const word = copies_.at(slot);
      count += word.state != copy_state::free && word.holder == holder ? 1 : 0;
    }
    return count;
  }
  void expect_counts(std::uint32_t free, std::uint32_t held, std::uint32_t kept) {
    auto const counted = copies_.count();
    EXPECT_EQ(counted.free, free);
    EXPECT_EQ(counted.held, held);
    EXPECT_EQ(counted.kept, kept);
    EXPECT_EQ(counted.damaged, 0U);
  }
};

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (error const& why) {
    return why.what();
  }
  return "";
}

TEST_F(host_copies_test, a_word_is_read_as_it_was_packed) {
  for (auto const state : {copy_state::held, copy_state::kept}) {
    copy_word const word{state, copy_holders - 1, (1ULL << 40U) - 1};
    EXPECT_EQ(copy_word::unpack(word.pack()), word);
  }
  EXPECT_EQ(copy_word::unpack(0), copy_word{});
}

TEST_F(host_copies_test, slots_are_held_kept_held_again_and_give_back) {
  auto const mine = copies_.hold(2, job);
  ASSERT_EQ(mine.size(), 2U);
  expect_counts(2, 2, 0);
  EXPECT_EQ(count_of(job), 2U);
  EXPECT_FALSE(copies_.hold_again(mine[0])) << "it is held";
  EXPECT_TRUE(copies_.keep(mine[0]));
  EXPECT_FALSE(copies_.keep(mine[0])) << "it is kept";
  expect_counts(2, 1, 1);
  EXPECT_TRUE(copies_.hold_again(mine[0]));
  EXPECT_TRUE(copies_.keep(mine[0]));
  EXPECT_TRUE(copies_.give_back(mine[0]));
  EXPECT_TRUE(copies_.give_back(mine[1]));
  EXPECT_FALSE(copies_.give_back(mine[1])) << "it is free";
  expect_counts(slots, 0, 0);
}

TEST_F(host_copies_test, too_few_free_slots_are_given_back) {
  ASSERT_EQ(copies_.hold(3, job).size(), 3U);
  EXPECT_TRUE(copies_.hold(2, other).empty());
  expect_counts(1, 3, 0);
  EXPECT_TRUE(copies_.hold(slots + 1, other).empty());
  EXPECT_EQ(copies_.hold(1, other).size(), 1U);
  EXPECT_TRUE(copies_.hold(0, other).empty());
  expect_counts(0, 4, 0);
}

TEST_F(host_copies_test, what_is_kept_may_be_stolen_and_its_holder_sees_it) {
  auto const mine = copies_.hold(2, job);
  ASSERT_EQ(mine.size(), 2U);
  ASSERT_TRUE(copies_.keep(mine[1]));
  EXPECT_TRUE(copies_.steal(2, job).empty()) << "its own";
  auto const stolen = copies_.steal(2, other);
  ASSERT_EQ(stolen.size(), 1U) << "what is held is not to be had";
  EXPECT_EQ(stolen[0].slot, mine[1].slot);
  EXPECT_FALSE(copies_.hold_again(mine[1]));
  EXPECT_FALSE(copies_.give_back(mine[1]));
  EXPECT_EQ(copies_.at(mine[1].slot).holder, other);
}

TEST_F(host_copies_test, a_slot_that_came_back_to_its_holder_is_another_copy) {
  auto const first = copies_.hold(slots, job);
  ASSERT_TRUE(copies_.keep(first[0]));
  auto const stolen = copies_.steal(1, other);
  ASSERT_EQ(stolen.size(), 1U);
  ASSERT_TRUE(copies_.give_back(stolen[0]));
  auto const again = copies_.hold(1, job);
  ASSERT_EQ(again.size(), 1U);
  ASSERT_EQ(again[0].slot, first[0].slot);
  ASSERT_TRUE(copies_.keep(again[0]));
  EXPECT_FALSE(copies_.hold_again(first[0]));
  EXPECT_TRUE(copies_.hold_again(again[0]));
}

TEST_F(host_copies_test, a_sweep_frees_a_dead_holders_slots_alone) {
  auto const dead = copies_.hold(2, job);
  ASSERT_EQ(dead.size(), 2U);
  ASSERT_TRUE(copies_.keep(dead[0]));
  ASSERT_EQ(copies_.hold(1, other).size(), 1U);
  EXPECT_EQ(copies_.sweep(job), 2U);
  EXPECT_EQ(copies_.sweep(job), 0U);
  expect_counts(3, 1, 0);
  EXPECT_EQ(count_of(other), 1U);
}

TEST_F(host_copies_test, damaged_words_are_refused_by_name_and_never_used) {
  std::array<std::uint64_t, slots> const bad{
      0xffULL << 56U,                                    // no such state
      3ULL << 56U,                                       // likewise
      1ULL << 56U | std::uint64_t{copy_holders} << 40U,  // no such holder
      std::uint64_t{job} << 40U};                        // free, and somebody's
  for (std::size_t i = 0; i < bad.size(); ++i) {
    words_.at(i).store(bad.at(i));
    EXPECT_NE(message_of([&] {
                (void)copies_.at(static_cast<std::uint32_t>(i));
              }).find("slot " + std::to_string(i)),
              std::string::npos);
  }
  EXPECT_EQ(copies_.count().damaged, slots);
  EXPECT_TRUE(copies_.hold(1, job).empty());
  EXPECT_TRUE(copies_.steal(1, job).empty());
  EXPECT_EQ(copies_.sweep(job), 0U);
  EXPECT_EQ(copies_.count().damaged, slots);
  EXPECT_NE(message_of([&] { (void)copies_.at(slots); }).find("no slot 4"), std::string::npos);
  EXPECT_THROW((void)copies_.hold(1, copy_holders), error);
  EXPECT_THROW((void)copies_.steal(1, copy_holders), error);
}

TEST(host_copies_race_test, one_slot_has_one_holder_at_a_time) {
  std::array<std::atomic<std::uint64_t>, 1> words{};
  std::uint64_t guarded = 0;  // by the slot: TSan sees two holders
  constexpr std::uint64_t rounds = 20'000;
  auto take_turns = [&](std::uint16_t holder) {
    host_copies copies{words};
    for (std::uint64_t done = 0; done < rounds;) {
      auto const mine = copies.hold(1, holder);
      if (mine.empty()) {
        std::this_thread::yield();
        continue;
      }
      ++guarded;
      ++done;
      ASSERT_TRUE(copies.give_back(mine[0]));
    }
  };
  std::thread beside{take_turns, other};
  take_turns(job);
  beside.join();
  EXPECT_EQ(guarded, 2 * rounds);
}

TEST(host_copies_race_test, of_a_thief_and_its_holder_one_has_the_copy) {
  std::array<std::atomic<std::uint64_t>, 1> words{};
  std::atomic<std::uint64_t> round{0};
  std::atomic<std::uint64_t> tried{0};
  constexpr std::uint64_t rounds = 20'000;
  std::uint64_t stolen = 0;
  std::thread thief{[&] {
    host_copies copies{words};
    for (std::uint64_t next = 1; next <= rounds; ++next) {
      while (round.load() < next) {
        std::this_thread::yield();
      }
      for (auto const& each : copies.steal(1, other)) {
        ++stolen;
        ASSERT_TRUE(copies.give_back(each));
      }
      tried.store(next);
    }
  }};
  host_copies copies{words};
  std::uint64_t had = 0;
  for (std::uint64_t next = 1; next <= rounds; ++next) {
    auto const mine = copies.hold(1, job);
    ASSERT_EQ(mine.size(), 1U);
    ASSERT_TRUE(copies.keep(mine[0]));
    round.store(next);
    if (copies.hold_again(mine[0])) {
      ++had;
      EXPECT_TRUE(copies.give_back(mine[0]));
    }
    while (tried.load() < next) {
      std::this_thread::yield();
    }
  }
  thief.join();
  EXPECT_EQ(had + stolen, rounds);
  EXPECT_EQ(copies.count().free, 1U);
}

class host_copies_table_test : public testing::Test {
 protected:
  alignas(64) std::array<std::byte, 4096> memory_{};
};

TEST_F(host_copies_table_test, is_found_as_it_was_made) {
  make_host_copies(memory_, 9_MiB, 2_MiB);
  auto const& header = host_copies_header_in(memory_);
  EXPECT_EQ(header.slots, 4U);
  EXPECT_EQ(header.slot_bytes, 2_MiB);
  EXPECT_EQ(header.budget, 9_MiB);
  EXPECT_EQ(host_copies{host_copies_words(memory_)}.count().free, 4U);
}

TEST_F(host_copies_table_test, a_budget_smaller_than_a_slot_is_refused_with_the_numbers) {
  for (auto const budget : {std::uint64_t{0}, 2_MiB - 1}) {
    EXPECT_NE(message_of([&] { (void)host_copy_slots(budget, 2_MiB); }).find("2 MiB"),
              std::string::npos);
  }
  EXPECT_EQ(host_copy_slots(2_MiB, 2_MiB), 1U);
  EXPECT_THROW((void)host_copy_slots(max_host_copy_slots + 1, 1), error);
}

TEST_F(host_copies_table_test, that_is_damaged_is_refused_with_what_is_wrong) {
  EXPECT_NE(message_of([&] { (void)host_copies_header_in(memory_); }).find("does not begin"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              (void)host_copies_header_in(std::span{memory_}.first(8));
            }).find("its header"),
            std::string::npos);
  make_host_copies(memory_, 8_MiB, 2_MiB);
  EXPECT_NE(message_of([&] {
              (void)host_copies_header_in(std::span{memory_}.first(sizeof(host_copies_header)));
            }).find("its slots"),
            std::string::npos);
  auto& header = host_copies_header_in(memory_);
  header.slots = 5;
  EXPECT_NE(message_of([&] { (void)host_copies_header_in(memory_); }).find("its budget"),
            std::string::npos);
  header.slots = 4;
  header.version = 99;
  EXPECT_NE(message_of([&] { (void)host_copies_header_in(memory_); }).find("version 99"),
            std::string::npos);
}

TEST_F(host_copies_table_test, every_pool_has_one_place_until_there_is_none) {
  make_host_copies(memory_, 8_MiB, 2_MiB);
  auto& header = host_copies_header_in(memory_);
  EXPECT_EQ(place_of_pool(header, 7), 0U);
  EXPECT_EQ(place_of_pool(header, 8), 1U);
  EXPECT_EQ(place_of_pool(header, 7), 0U);
  for (std::uint64_t id = 100; id < 100 + host_copy_pools - 2; ++id) {
    EXPECT_TRUE(place_of_pool(header, id));
  }
  EXPECT_FALSE(place_of_pool(header, 9));
}

}  // namespace
}  // namespace sluice::memhandover
