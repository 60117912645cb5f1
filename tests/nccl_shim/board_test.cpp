/// Who is let go of those that say on a board for whom they wait.
#include "nccl_shim/agreement/board.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

namespace sluice::nccl_shim {
namespace {

using why = board::reason;

class board_test : public ::testing::Test {
 protected:
  board_test() {
    for (unsigned place = 0; place < 4; ++place) {
      all_.emplace_back(*memory_, place);
    }
  }

  /// A process waits for the others whose bits these are.
  bool wait(unsigned place, std::uint32_t places, why reason = why::exchange) {
    return all_.at(place).wait(who(place), reason, [places] { return places; });
  }
  [[nodiscard]] bool is_released(unsigned place) { return all_.at(place).release(); }
  bool take_back(unsigned place) { return all_.at(place).take_back(who(place)); }
  void make(unsigned place) {
    all_.at(place).progressed();
    all_.at(place).made(who(place));
  }
  [[nodiscard]] board& at(unsigned place) { return all_.at(place); }
  [[nodiscard]] void const* who(unsigned place) const { return &all_.at(place); }

 private:
  std::unique_ptr<board_memory> memory_ = std::make_unique<board_memory>();
  std::deque<board> all_;
};

TEST_F(board_test, two_are_released_when_the_second_has_come) {
  wait(0, 0b10);
  EXPECT_FALSE(is_released(0));
  wait(1, 0b01);
  EXPECT_TRUE(is_released(1));
  EXPECT_TRUE(is_released(0));
}

TEST_F(board_test, who_waits_for_others_that_wait_for_each_other_is_not_released_with_them) {
  wait(0, 0b010);
  wait(1, 0b001);
  wait(2, 0b001);
  EXPECT_FALSE(is_released(2));
  EXPECT_TRUE(is_released(0));
  EXPECT_FALSE(is_released(2));
  make(0);
  make(1);
  EXPECT_FALSE(is_released(2));
}

TEST_F(board_test, a_ring_is_released_as_a_whole) {
  wait(0, 0b0010);
  wait(1, 0b0100);
  wait(2, 0b1000);
  EXPECT_FALSE(is_released(2));
  wait(3, 0b0001);
  EXPECT_TRUE(is_released(2));
  EXPECT_TRUE(is_released(0) && is_released(1) && is_released(3));
}

TEST_F(board_test, who_takes_back_is_not_released_and_nobody_is_with_it) {
  wait(0, 0b10);
  wait(1, 0b01);
  EXPECT_FALSE(take_back(0));
  EXPECT_FALSE(is_released(1));
  wait(0, 0b10);
  EXPECT_TRUE(is_released(1));
}

TEST_F(board_test, who_takes_back_too_late_owes_it) {
  wait(0, 0b10);
  wait(1, 0b01);
  ASSERT_TRUE(is_released(1));
  EXPECT_TRUE(take_back(0));
  make(0);
  wait(0, 0b10);
  EXPECT_FALSE(is_released(0));  // the other one has not made its part yet
}

TEST_F(board_test, who_waits_in_a_collective_is_not_released_but_those_that_it_holds_up_are) {
  wait(0, 0b10, why::collective);
  wait(1, 0b01);
  EXPECT_TRUE(is_released(1));
  EXPECT_FALSE(take_back(0));
}

TEST_F(board_test, what_is_said_of_somebody_who_has_done_its_part_counts_no_more) {
  wait(0, 0b10, why::collective);
  at(1).progressed();  // it has come to that collective
  wait(1, 0b01);
  EXPECT_FALSE(is_released(1));
}

TEST_F(board_test, whom_it_waits_for_must_be_the_same_after_their_progress_was_read) {
  std::uint32_t places = 0b110;
  EXPECT_FALSE(
      at(0).wait(who(0), why::exchange, [&places] { return std::exchange(places, 0b100); }));
  EXPECT_FALSE(at(0).wait(who(0), why::exchange, [] { return 0U; }));
}

TEST_F(board_test, an_exchange_comes_before_a_collective_of_another_thread) {
  int collective = 0;
  int other = 0;
  auto const places = [] { return 0b10U; };
  EXPECT_TRUE(at(0).wait(&collective, why::collective, places));
  EXPECT_TRUE(wait(0, 0b10));
  EXPECT_FALSE(at(0).wait(&collective, why::collective, places));
  EXPECT_FALSE(at(0).wait(&other, why::exchange, places));
  EXPECT_FALSE(at(0).take_back(&collective));
  wait(1, 0b01);
  EXPECT_TRUE(is_released(0));
}

class board_file : public ::testing::Test {
 protected:
  board_file() {
    std::string name = ::testing::TempDir() + "sluice-board-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~board_file() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string folder() const { return folder_.string(); }

  /// The place that another process gets, which ends without giving it back.
  [[nodiscard]] int place_of_another_process() const {
    pid_t const child = ::fork();
    if (child == 0) {
      auto const own = board::open(folder());
      ::_exit(own != nullptr ? static_cast<int>(own->place()) : 255);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(board_file, each_process_has_a_place_of_its_own_and_that_of_a_dead_one_is_free) {
  auto const own = board::open(folder());
  ASSERT_NE(own, nullptr);
  int const first = place_of_another_process();
  EXPECT_NE(first, static_cast<int>(own->place()));
  EXPECT_EQ(place_of_another_process(), first);
}

TEST_F(board_file, a_folder_that_is_not_there_is_told) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(board::open(folder() + "/nowhere"), nullptr);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("nowhere/exchanges cannot be used: No such file or directory"));
}

}  // namespace
}  // namespace sluice::nccl_shim
