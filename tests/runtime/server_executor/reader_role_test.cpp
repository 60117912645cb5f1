#include "runtime/server/executor/detail/reader_role.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

namespace sluice::server::testing {
namespace {

using detail::reader_role;
using member = reader_role::member;

void wait_for(std::atomic<bool> const& what) {
  what.wait(false);
}

class a_reader_role : public ::testing::Test {
 protected:
  ~a_reader_role() override {
    role_.close();
    if (second_.joinable()) {
      second_.join();
    }
  }

  /// The second waits for its turn, and says when it has it.
  void start_second() {
    second_ = std::thread{[this] {
      if (role_.await_turn(member::second)) {
        has_second_ = true;
        has_second_.notify_all();
      }
    }};
    while (!role_.has_deputy(member::first)) {
      std::this_thread::yield();
    }
  }

  reader_role role_;
  std::atomic<bool> has_second_ = false;
  std::thread second_;
};

TEST_F(a_reader_role, is_the_first_ones) {
  EXPECT_TRUE(role_.await_turn(member::first));
  EXPECT_FALSE(role_.has_deputy(member::first));
}

TEST_F(a_reader_role, stays_with_who_comes_back_soon_or_goes_to_the_other_one) {
  start_second();
  bool is_first = true;
  for (int i = 0; i < 1000 && is_first; ++i) {
    role_.begin(member::first);
    is_first = role_.end(member::first);
  }
  if (is_first) {  // this thread had a processor all the time
    EXPECT_FALSE(has_second_);
    role_.begin(member::first);  // and stays away
  }
  wait_for(has_second_);
  EXPECT_FALSE(role_.end(member::first));
  EXPECT_FALSE(role_.has_deputy(member::first)) << "it reads";
  // Who comes back waits for its turn, which it has when the other one stays away.
  std::atomic<bool> is_back = false;
  std::thread first{[&] {
    if (role_.await_turn(member::first)) {
      is_back = true;
      is_back.notify_all();
    }
  }};
  while (!role_.has_deputy(member::second)) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(is_back);
  role_.begin(member::second);
  wait_for(is_back);
  first.join();
}

TEST_F(a_reader_role, can_be_given_away) {
  start_second();
  role_.pass(member::first);
  wait_for(has_second_);
}

/// Whoever gets the role does not say of the other one that it waits no more.
TEST_F(a_reader_role, that_changes_hands_leaves_a_deputy) {
  constexpr int times = 200;
  std::atomic<int> given = 0;
  auto const run = [&](member me) {
    while (role_.await_turn(me)) {
      while (!role_.has_deputy(me)) {
        std::this_thread::yield();
      }
      if (++given == times) {
        role_.close();
      } else {
        role_.pass(me);
      }
    }
  };
  std::thread second{[&] { run(member::second); }};
  run(member::first);
  second.join();
  EXPECT_EQ(given, times);
}

TEST_F(a_reader_role, that_is_closed_is_waited_for_by_nobody) {
  start_second();
  role_.close();
  second_.join();
  EXPECT_FALSE(has_second_);
  EXPECT_FALSE(role_.await_turn(member::first));
}

/// Each of two is away for longer than the other one's patience now and then; never do both read.
TEST_F(a_reader_role, is_never_that_of_both) {
  std::atomic<int> readers = 0, changes = 0;
  auto const read = [&](member me) {
    for (int round = 0; role_.await_turn(me); ++round) {
      EXPECT_EQ(++readers, 1);
      --readers;
      role_.begin(me);
      if (round % 50 == 49) {
        auto const until = reader_role::clock::now() + 2 * reader_role::patience;
        while (reader_role::clock::now() < until) {
        }
      }
      role_.end(me);
      if (round % 50 == 49 && ++changes == 40) {
        role_.close();
      }
    }
  };
  std::thread second{[&] { read(member::second); }};
  read(member::first);
  second.join();
}

}  // namespace
}  // namespace sluice::server::testing
