/// The prediction of when a stream is done, and what is learned of each kind of work. Pure: no
/// driver, no clock.
#include "runtime/gate/run_ahead.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "runtime/gate/durations.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t us = 1000;
constexpr std::int64_t latency = 4 * us;  // of a launch on an idle device

class run_ahead_test : public testing::Test {
 protected:
  void launch(std::int64_t now, std::chrono::nanoseconds takes) { ahead_.launched(now, takes); }
  run_ahead ahead_;
  std::array<int, 4> events_{};
};

TEST_F(run_ahead_test, an_idle_stream_has_room_for_anything) {
  EXPECT_TRUE(ahead_.has_room(1'000'000, 10ms, 100us));
  EXPECT_EQ(ahead_.oldest(), nullptr);
}

TEST_F(run_ahead_test, launches_add_up_and_the_clock_moves_them_on) {
  launch(0, 50us);
  launch(0, 70us);
  EXPECT_EQ(ahead_.end(), latency + 120 * us);
  EXPECT_FALSE(ahead_.has_room(0, 10us, 70us));
  EXPECT_TRUE(ahead_.has_room(0, 10us, 80us)) << "the unit that is executing does not count";
  EXPECT_TRUE(ahead_.has_room(110 * us, 9ms, 70us)) << "the second is about to end";
}

TEST_F(run_ahead_test,
       what_is_longer_than_the_bound_comes_just_before_the_end_of_what_is_before_it) {
  launch(0, 50us);
  launch(0, 60us);
  EXPECT_FALSE(ahead_.has_room(0, 9ms, 200us));
  EXPECT_FALSE(ahead_.has_room(60 * us, 9ms, 200us));
  EXPECT_TRUE(ahead_.has_room(100 * us, 9ms, 200us)) << "so that the device does not wait for it";
}

TEST_F(run_ahead_test, what_lies_before_a_late_event_counts_as_executing) {
  launch(0, 50us);
  ahead_.marked(0, {.event = &events_[0]});
  launch(0, 100us);
  ahead_.is_late(300 * us);
  EXPECT_FALSE(ahead_.has_room(300 * us, 10us, 105us));
  EXPECT_TRUE(ahead_.has_room(300 * us, 10us, 115us));
}

TEST_F(run_ahead_test, an_event_that_happened_early_brings_what_follows_forward) {
  launch(0, 100us);
  ahead_.marked(0, {.event = &events_[0]});
  launch(0, 40us);
  EXPECT_EQ(ahead_.completed(30 * us).event, &events_[0]);
  EXPECT_EQ(ahead_.end(), 70 * us);
}

TEST_F(run_ahead_test, an_event_that_is_late_puts_off_what_follows) {
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[0]});
  launch(0, 40us);
  ahead_.is_late(200 * us);
  EXPECT_EQ(ahead_.end(), 240 * us + 1);
  EXPECT_FALSE(ahead_.has_room(200 * us, 0us, 20us));
}

TEST_F(run_ahead_test, an_event_that_happened_in_time_changes_nothing) {
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[0]});
  launch(0, 40us);
  auto const end = ahead_.end();
  (void)ahead_.completed(50 * us);
  EXPECT_EQ(ahead_.end(), end);
}

TEST_F(run_ahead_test, events_are_asked_for_only_when_the_answer_can_matter) {
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[0]});
  EXPECT_FALSE(ahead_.should_ask(0, 10us, 100us)) << "there is room, and it is not due";
  EXPECT_TRUE(ahead_.should_ask(0, 10us, 5us)) << "there is no room unless it is early";
  EXPECT_TRUE(ahead_.should_ask(20 * us, 10us, 100us)) << "it is due";
}

TEST_F(run_ahead_test, a_launch_between_two_events_is_alone) {
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[0], .measures = 7});
  launch(0, 10us);
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[1]});
  auto const first = ahead_.completed(1 * us);
  EXPECT_TRUE(first.alone);
  EXPECT_EQ(first.measures, 7U);
  EXPECT_FALSE(ahead_.completed(2 * us).alone);
}

TEST_F(run_ahead_test, what_a_launch_takes_less_among_others_is_learned_from_whole_groups) {
  std::int64_t now = 0;
  launch(now, 100us);
  ahead_.marked(now, {.event = &events_[0]});
  auto const group = [&](std::chrono::nanoseconds each) {
    for (int i = 0; i < 10; ++i) {
      launch(now, 30us);  // as measured alone
    }
    ahead_.marked(now, {.event = &events_[1]});
    // The one before it is seen to happen, and this one begins.
    ahead_.is_late(now);
    (void)ahead_.completed(now);
    now += 10 * each.count();
  };
  for (int i = 0; i < 50; ++i) {
    group(30us);
  }
  EXPECT_NEAR(static_cast<double>(ahead_.correction().count()), 0, 500);
  for (int i = 0; i < 100; ++i) {
    group(24us);
  }
  EXPECT_NEAR(static_cast<double>(ahead_.correction().count()), -6e3, 700);
}

TEST_F(run_ahead_test, what_was_not_seen_to_happen_teaches_nothing) {
  std::int64_t now = 0;
  for (int i = 0; i < 100; ++i) {
    for (int j = 0; j < 10; ++j) {
      launch(now, 30us);
    }
    ahead_.marked(now, {.event = &events_[0]});
    now += 200 * us;
    (void)ahead_.completed(now);
  }
  EXPECT_EQ(ahead_.correction(), 0ns);
}

TEST_F(run_ahead_test, what_cannot_be_marked_is_forgotten) {
  launch(0, 10us);
  ahead_.marked(0, {.event = &events_[0]});
  launch(0, 500us);
  ahead_.forget_unmarked(3 * us);
  EXPECT_EQ(ahead_.end(), latency + 10 * us);
  EXPECT_EQ(ahead_.unmarked_work(), 0ns);
}

TEST_F(run_ahead_test, an_event_on_an_idle_stream_is_not_late_at_once) {
  ahead_.marked(500 * us, {.event = &events_[0]});
  launch(500 * us, 10us);
  ahead_.is_late(502 * us);
  EXPECT_LE(ahead_.end(), 520 * us);
}

TEST_F(run_ahead_test, clearing_gives_every_event_back_once) {
  for (int& event : events_) {
    launch(0, 10us);
    ahead_.marked(0, {.event = &event});
  }
  launch(0, 10us);
  for (int& event : events_) {
    auto const given = ahead_.clear();
    ASSERT_TRUE(given.has_value());
    EXPECT_EQ(given->event, &event);
  }
  EXPECT_FALSE(ahead_.clear().has_value());
  EXPECT_TRUE(ahead_.has_room(0, 1s, 0ns));
}

TEST(durations_test, kinds_differ_in_every_part) {
  EXPECT_NE(key_of_work({1, 2, 3}), key_of_work({1, 3, 2}));
  EXPECT_NE(key_of_work({1, 2}), key_of_work({1, 2, 0}));
  EXPECT_NE(key_of_work({0}), 0U);
}

TEST(durations_test, the_mean_follows_what_is_measured) {
  durations known;
  auto const kind = key_of_work({1, 2, 3});
  EXPECT_EQ(known.of(kind).measured, 0U);
  known.learn(kind, 100us);
  EXPECT_EQ(known.of(kind).mean, 100us);
  for (int i = 0; i < 60; ++i) {
    known.learn(kind, 200us);
  }
  EXPECT_NEAR(static_cast<double>(known.of(kind).mean.count()), 200e3, 10);
  EXPECT_EQ(known.of(kind).measured, 61U);
}

TEST(durations_test,
     of_the_first_measurements_the_shortest_counts_and_of_later_ones_none_by_itself) {
  durations known;
  auto const kind = key_of_work({4});
  for (auto const took : {300us, 100us, 110us, 900us}) {
    known.learn(kind, took);
  }
  EXPECT_EQ(known.of(kind).mean, 100us);
  known.learn(kind, 10ms);
  EXPECT_EQ(known.of(kind).mean, 125us);
}

TEST(durations_test, a_full_table_keeps_what_it_has_and_forgets_nothing) {
  durations known;
  auto const kind = [](std::uint64_t i) { return key_of_work({i, i * i}); };
  for (std::uint64_t i = 0; i < 40'000; ++i) {
    known.learn(kind(i), std::chrono::nanoseconds{i + 1});
  }
  std::uint64_t kept = 0;
  for (std::uint64_t i = 0; i < 40'000; ++i) {
    auto const found = known.of(kind(i));
    kept += found.measured;
    EXPECT_EQ(known.has_place(kind(i)), found.measured > 0);
    EXPECT_TRUE(found.measured == 0 || found.mean.count() == static_cast<std::int64_t>(i) + 1);
  }
  EXPECT_GT(kept, 4000U);
  EXPECT_LE(kept, 8192U);
}

TEST(durations_test, threads_that_learn_at_once_leave_values_that_were_measured) {
  durations known;
  auto learn = [&known](std::int64_t value) {
    for (std::uint64_t i = 0; i < 20'000; ++i) {
      known.learn(key_of_work({i % 50}), std::chrono::nanoseconds{value});
    }
  };
  {
    std::jthread const first{learn, 1000};
    std::jthread const second{learn, 2000};
  }
  for (std::uint64_t i = 0; i < 50; ++i) {
    auto const mean = known.of(key_of_work({i})).mean;
    EXPECT_GE(mean, 1000ns);
    EXPECT_LE(mean, 2000ns);
  }
}

}  // namespace
}  // namespace sluice::gate
