#include "memhandover/ledger/host_copies.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/ledger/host_copy_table.hpp"
#include "tests/from_environment.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr std::uint32_t slots_of_table = 4;
constexpr std::uint16_t job = copy_holder(0, 3);
constexpr std::uint16_t another = copy_holder(1, 3);

class host_copies_test : public testing::Test {
 protected:
  std::array<std::atomic<std::uint64_t>, slots_of_table> words_{};
  host_copies copies_{words_};

  [[nodiscard]] std::uint32_t count_of(std::uint16_t holder) const {
    std::uint32_t count = 0;
    for (std::uint32_t slot = 0; slot < slots_of_table; ++slot) {
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
  expect_counts(slots_of_table, 0, 0);
}

TEST_F(host_copies_test, too_few_free_slots_are_given_back) {
  ASSERT_EQ(copies_.hold(3, job).size(), 3U);
  EXPECT_TRUE(copies_.hold(2, another).empty());
  expect_counts(1, 3, 0);
  EXPECT_TRUE(copies_.hold(slots_of_table + 1, another).empty());
  EXPECT_EQ(copies_.hold(1, another).size(), 1U);
  EXPECT_TRUE(copies_.hold(0, another).empty());
  expect_counts(0, 4, 0);
}

TEST_F(host_copies_test, what_is_kept_may_be_stolen_and_its_holder_sees_it) {
  auto const mine = copies_.hold(2, job);
  ASSERT_EQ(mine.size(), 2U);
  ASSERT_TRUE(copies_.keep(mine[1]));
  EXPECT_TRUE(copies_.steal(2, job).empty()) << "its own";
  auto const stolen = copies_.steal(2, another);
  ASSERT_EQ(stolen.size(), 1U) << "what is held is not to be had";
  EXPECT_EQ(stolen[0].slot, mine[1].slot);
  EXPECT_FALSE(copies_.hold_again(mine[1]));
  EXPECT_FALSE(copies_.give_back(mine[1]));
  EXPECT_EQ(copies_.at(mine[1].slot).holder, another);
}

TEST_F(host_copies_test, a_slot_that_came_back_to_its_holder_is_another_copy) {
  auto const first = copies_.hold(slots_of_table, job);
  ASSERT_TRUE(copies_.keep(first[0]));
  auto const stolen = copies_.steal(1, another);
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
  ASSERT_EQ(copies_.hold(1, another).size(), 1U);
  auto const is_dead = [](std::uint16_t holder) { return holder == job; };
  EXPECT_EQ(copies_.sweep(is_dead), 2U);
  EXPECT_EQ(copies_.sweep(is_dead), 0U);
  expect_counts(3, 1, 0);
  EXPECT_EQ(count_of(another), 1U);
}

TEST_F(host_copies_test, damaged_words_are_refused_by_name_and_never_used) {
  std::array<std::uint64_t, slots_of_table> const bad{
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
  EXPECT_EQ(copies_.count().damaged, slots_of_table);
  EXPECT_TRUE(copies_.hold(1, job).empty());
  EXPECT_TRUE(copies_.steal(1, job).empty());
  EXPECT_EQ(copies_.sweep([](std::uint16_t /*any*/) { return true; }), 0U);
  EXPECT_EQ(copies_.count().damaged, slots_of_table);
  EXPECT_NE(message_of([&] { (void)copies_.at(slots_of_table); }).find("no slot 4"),
            std::string::npos);
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
  std::thread beside{take_turns, another};
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
      for (auto const& each : copies.steal(1, another)) {
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
  static constexpr std::size_t bytes = sizeof(host_copies_header) + 4 * sizeof(std::uint64_t);
  alignas(64) std::array<std::byte, bytes> memory_{};

  [[nodiscard]] std::string refusal(std::size_t first_bytes = bytes) {
    return message_of([&] { (void)host_copies_shape_in(std::span{memory_}.first(first_bytes)); });
  }
};

TEST_F(host_copies_table_test, is_found_as_it_was_made) {
  make_host_copies(memory_, 9_MiB, 2_MiB);
  auto const shape = host_copies_shape_in(memory_);
  EXPECT_EQ(shape, (host_copies_shape{4, 2_MiB}));
  EXPECT_EQ(shape.bytes(), 8_MiB);
  EXPECT_EQ(host_copies{host_copies_words(memory_, shape)}.count().free, 4U);
}

TEST_F(host_copies_table_test, has_slots_on_a_disk_behind_those_in_memory) {
  make_host_copies(memory_, 3_MiB, 2_MiB, 7_MiB);
  auto const shape = host_copies_shape_in(memory_);
  EXPECT_EQ(shape, (host_copies_shape{4, 2_MiB, 3}));
  EXPECT_EQ(shape.bytes(), 2_MiB);
  EXPECT_EQ(shape.disk_bytes(), 6_MiB);
  EXPECT_FALSE(shape.is_on_disk(0));
  EXPECT_TRUE(shape.is_on_disk(1));
  EXPECT_NE(message_of([&] {
              make_host_copies(memory_, 6_MiB, 2_MiB, 1_MiB);
            }).find("1 MiB on disk, but one takes 2 MiB"),
            std::string::npos);
  host_copies_header_in(memory_).disk_slots.store(4);
  EXPECT_NE(refusal().find("its budget"), std::string::npos);
  host_copies_header_in(memory_).disk_slots.store(2);
  EXPECT_NE(refusal().find("its budget"), std::string::npos);
}

TEST(host_copies_on_disk, are_taken_when_memory_has_none_or_when_they_alone_are_asked_for) {
  std::array<std::atomic<std::uint64_t>, 5> words{};
  host_copies copies{words, 2};
  EXPECT_EQ(copies.count(copy_place::memory).free, 3U);
  EXPECT_EQ(copies.count(copy_place::disk).free, 2U);
  EXPECT_TRUE(copies.hold(4, job, copy_place::memory).empty());
  EXPECT_EQ(copies.hold(3, job).back().slot, 2U);
  EXPECT_TRUE(copies.hold(1, job, copy_place::memory).empty());
  auto const on_disk = copies.hold(2, job, copy_place::disk);
  ASSERT_EQ(on_disk.size(), 2U);
  EXPECT_EQ(on_disk.front().slot, 3U);
  EXPECT_TRUE(copies.keep(on_disk.front()));
  EXPECT_TRUE(copies.steal(1, another, copy_place::memory).empty());
  EXPECT_EQ(copies.steal(1, another, copy_place::disk).size(), 1U);
  EXPECT_EQ(copies.count(copy_place::disk).held, 2U);
  EXPECT_EQ(copies.count().held, 5U);
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
  EXPECT_NE(refusal().find("does not begin"), std::string::npos);
  EXPECT_NE(refusal(8).find("its header"), std::string::npos);
  make_host_copies(memory_, 8_MiB, 2_MiB);
  EXPECT_EQ(refusal(), "");
  EXPECT_NE(refusal(sizeof(host_copies_header)).find("its slots"), std::string::npos);
  EXPECT_THROW(make_host_copies(memory_, 10_MiB, 2_MiB), error) << "of five slots";
  auto& header = host_copies_header_in(memory_);
  header.slots.store(5);
  EXPECT_NE(refusal().find("its budget"), std::string::npos);
  header.slots.store(4);
  header.version.store(99);
  EXPECT_NE(refusal().find("version 99"), std::string::npos);
}

TEST_F(host_copies_table_test, whatever_its_header_says_it_is_refused_or_as_long_as_it_says) {
  constexpr std::array<std::uint64_t, 9> nasty{
      0, 1, 3, 5, 1ULL << 24U, (1ULL << 24U) + 1, 1ULL << 32U, 1ULL << 63U, ~0ULL};
  auto const seed = from_environment("SLUICE_TEST_SEED", std::random_device{}());
  SCOPED_TRACE("SLUICE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random{seed};
  std::uint32_t opened = 0;
  for (int turn = 0; turn < 100'000; ++turn) {
    make_host_copies(memory_, 8_MiB, 2_MiB);
    auto& header = host_copies_header_in(memory_);
    auto const any = [&] {
      return random() % 4 == 0 ? random() : nasty.at(random() % nasty.size());
    };
    for (auto places = random() % 3; places > 0; --places) {
      switch (random() % 7) {
        case 0:
          header.magic.store(any());
          break;
        case 1:
          header.version.store(static_cast<std::uint32_t>(any()));
          break;
        case 2:
          header.slots.store(static_cast<std::uint32_t>(any()));
          break;
        case 3:
          header.slot_bytes.store(any());
          break;
        case 4:
          header.disk_slots.store(static_cast<std::uint32_t>(any()));
          break;
        case 5:
          header.disk_budget.store(any());
          break;
        default:
          header.budget.store(any());
      }
    }
    try {
      auto const shape = host_copies_shape_in(memory_);
      ASSERT_EQ(shape.slots, 4U);
      ASSERT_EQ(host_copies_words(memory_, shape).size(), 4U);
      ASSERT_EQ(shape.bytes() / shape.memory_slots(), shape.slot_bytes)
          << "more bytes than can be counted";
      ASSERT_EQ(shape.disk_bytes() / shape.slot_bytes, shape.disk_slots);
      ++opened;
    } catch (error const& why) {
      ASSERT_NE(std::string{why.what()}.find("damaged"), std::string::npos);
    }
  }
  EXPECT_GT(opened, 0U);
  EXPECT_LT(opened, 100'000U);
}

TEST(host_copy_table_test, of_a_shape_that_the_bytes_do_not_have_is_refused) {
  auto const files = create_host_copies(8_MiB, 2_MiB);
  auto const others = create_host_copies(8_MiB, 1_MiB);
  EXPECT_TRUE(same_memory(files, {duplicate(files.bytes.get()), duplicate(files.table.get())}));
  EXPECT_FALSE(same_memory(files, others));
  host_copy_files const more{duplicate(create_host_copies(10_MiB, 2_MiB).bytes.get()),
                             duplicate(files.table.get())};
  EXPECT_NE(message_of([&] {
              host_copy_table{more};
            }).find("it tells of 8388608 bytes, but there are 10485760"),
            std::string::npos);
  auto const disk = [](std::uint64_t bytes) {
    unique_fd made{::memfd_create("disk", MFD_CLOEXEC)};
    EXPECT_EQ(::ftruncate(made.get(), static_cast<off_t>(bytes)), 0);
    return made;
  };
  auto with_disk = create_host_copies(8_MiB, 2_MiB, disk(6_MiB));
  EXPECT_EQ(host_copy_table{with_disk}.shape(), (host_copies_shape{7, 2_MiB, 3}));
  EXPECT_TRUE(same_memory(with_disk, duplicate(with_disk)));
  for (auto const bytes : {std::uint64_t{0}, 4_MiB}) {
    auto other = duplicate(with_disk);
    other.disk = bytes == 0 ? unique_fd{} : disk(bytes);
    EXPECT_FALSE(same_memory(with_disk, other));
    EXPECT_NE(message_of([&] {
                host_copy_table{other};
              }).find("it tells of 6291456 bytes on disk, but there are " + std::to_string(bytes)),
              std::string::npos);
  }
  host_copy_files const exchanged{duplicate(files.table.get()), duplicate(files.bytes.get())};
  EXPECT_NE(message_of([&] { host_copy_table{exchanged}; }).find("does not begin"),
            std::string::npos);
}

TEST(host_copy_table_test, that_can_become_shorter_is_refused) {
  auto const files = create_host_copies(8_MiB, 2_MiB);
  for (bool const table : {false, true}) {
    unique_fd loose{::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    ASSERT_EQ(::ftruncate(loose.get(), 8_MiB), 0);
    host_copy_files const brought{table ? duplicate(files.bytes.get()) : std::move(loose),
                                  table ? std::move(loose) : duplicate(files.table.get())};
    EXPECT_NE(message_of([&] { host_copy_table{brought}; }).find("not sealed"), std::string::npos);
  }
  auto [read, write] = make_pipe("a test");
  host_copy_files const no_memory{duplicate(files.bytes.get()), std::move(read)};
  EXPECT_THROW(host_copy_table{no_memory}, error);
}

TEST(host_copy_table_test, keeps_to_its_shape_whatever_is_written_later) {
  auto const files = create_host_copies(8_MiB, 2_MiB);
  host_copy_table table{files};
  auto& header = table.header();
  header.slots.store(1U << 24U);
  header.slot_bytes.store(0);
  EXPECT_EQ(table.shape(), (host_copies_shape{4, 2_MiB}));
  EXPECT_EQ(table.copies().count().free, 4U);
  EXPECT_THROW((void)table.copies().at(4), error);
}

}  // namespace
}  // namespace sluice::memhandover
