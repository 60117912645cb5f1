#include "scheduler/parking_turns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;
using time_point = parking_turns::time_point;

time_point at(nanoseconds since_start) {
  return time_point{100h} + since_start;
}

constexpr turn_rules half_of_a_minute{.share = 0.5, .window = 60s, .stay = 10};

TEST(parking_turns, a_job_that_never_left_may_be_parked_at_once) {
  parking_turns const turns{half_of_a_minute};
  EXPECT_EQ(turns.stays_until(), time_point::min());
  EXPECT_FALSE(turns.is_away());
}

TEST(parking_turns, a_job_that_has_come_back_stays_in_proportion_to_its_swap) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.came_back(at(2s), 300ms);
  EXPECT_EQ(turns.stays_until(), at(2s + 10 * 300ms));
}

TEST(parking_turns, memory_is_owed_so_early_that_it_is_back_in_time) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  EXPECT_EQ(turns.owed_at(0ns), at(30s));
  EXPECT_EQ(turns.owed_at(400ms), at(30s - 800ms));
  EXPECT_EQ(turns.owed_at(40s), at(0s)) << "not before it left";
}

TEST(parking_turns, absences_of_a_window_count_together) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.came_back(at(10s), 100ms);
  turns.left(at(20s));
  EXPECT_EQ(turns.owed_at(0ns), at(40s)) << "ten of the thirty seconds are used up";
  EXPECT_EQ(turns.away_in_window(at(25s)), 15s);
}

TEST(parking_turns, what_has_left_the_window_counts_no_more) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.came_back(at(30s), 100ms);
  turns.left(at(90s));
  EXPECT_EQ(turns.owed_at(0ns), at(120s));
  EXPECT_EQ(turns.away_in_window(at(95s)), 5s);
}

TEST(parking_turns, whose_share_is_used_up_stays_until_an_absence_is_worth_its_swap) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.came_back(at(30s), 500ms);
  // 2 s have to fit: those that leave the window meanwhile.
  EXPECT_EQ(turns.stays_until(), at(60s));
  parking_turns late{half_of_a_minute};
  late.left(at(0s));
  late.came_back(at(40s), 500ms);
  EXPECT_EQ(late.stays_until(), at(70s)) << "it was away for too long, and is here for longer";
}

TEST(parking_turns, a_swap_that_takes_longer_than_the_share_allows_is_made_all_the_same) {
  parking_turns turns{{.share = 0.9, .window = 10s, .stay = 1}};
  turns.left(at(0s));
  turns.came_back(at(3s), 3s);
  EXPECT_EQ(turns.stays_until(), at(12s)) << "a window's worth of absence has to be free again";
  EXPECT_EQ(turns.missed(), 0s) << "nobody wanted it";
}

TEST(parking_turns, whoever_comes_back_too_late_has_missed_by_that_much) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.wanted(at(1s));
  turns.came_back(at(31s), 100ms);
  EXPECT_EQ(turns.missed(), 1s);
  turns.left(at(200s));
  turns.wanted(at(201s));
  turns.came_back(at(230s), 100ms);
  EXPECT_EQ(turns.missed(), 1s) << "in time";
}

TEST(parking_turns, nobody_misses_what_nobody_wants) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.wanted(at(100s));
  turns.came_back(at(100s + 150ms), 100ms);
  EXPECT_EQ(turns.missed(), 50ms) << "a swap after it was wanted would have been in time";
}

TEST(parking_turns, an_absolute_bound_counts_where_it_comes_first) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s), at(5s));
  EXPECT_EQ(turns.owed_at(0ns), at(5s));
  EXPECT_EQ(turns.owed_at(1s), at(3s));
  turns.came_back(at(4s), 1s);
  turns.left(at(70s), at(700s));
  EXPECT_EQ(turns.owed_at(0ns), at(100s));
}

TEST(parking_turns, without_a_share_nothing_is_owed) {
  parking_turns turns{{.share = 0.0, .window = 1s, .stay = 3}};
  turns.left(at(0s));
  turns.wanted(at(0s));
  EXPECT_EQ(turns.owed_at(0ns), time_point::max());
  EXPECT_EQ(turns.owed_at(1s), time_point::max());
  turns.came_back(at(100s), 2s);
  EXPECT_EQ(turns.stays_until(), at(106s));
  EXPECT_EQ(turns.missed(), 0s);
}

TEST(parking_turns, with_the_whole_share_a_job_is_never_parked) {
  parking_turns const turns{{.share = 1.0, .window = 1s, .stay = 3}};
  EXPECT_EQ(turns.stays_until(), time_point::max());
}

TEST(parking_turns, rules_may_change_and_what_has_begun_ends_by_the_old_ones) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(0s));
  turns.revise({.share = 0.75, .window = 20s, .stay = 2});
  EXPECT_EQ(turns.owed_at(0ns), at(30s));
  turns.came_back(at(6s), 1s);
  EXPECT_EQ(turns.window(), 20s);
  EXPECT_EQ(turns.stays_until(), at(21s))
      << "so much of its absence has left the 20 s then that four swaps fit";
}

TEST(parking_turns, what_makes_no_sense_is_refused_with_the_value) {
  for (double const share : {-0.1, 1.1}) {
    EXPECT_THROW((parking_turns{{.share = share}}), std::invalid_argument);
  }
  try {
    parking_turns{{.share = 0.5, .window = -3ns}};
    FAIL();
  } catch (std::invalid_argument const& why) {
    EXPECT_NE(std::string{why.what()}.find("-3"), std::string::npos);
  }
  parking_turns turns{half_of_a_minute};
  EXPECT_THROW(turns.revise({.share = 0.5, .window = 0ns}), std::invalid_argument);
}

TEST(parking_turns, instants_out_of_order_count_as_simultaneous) {
  parking_turns turns{half_of_a_minute};
  turns.left(at(10s));
  turns.came_back(at(5s), 1s);
  EXPECT_EQ(turns.away_in_window(at(20s)), 0s);
  turns.left(at(1s));
  EXPECT_EQ(turns.owed_at(0ns), at(40s));
  turns.left(at(30s));
  EXPECT_EQ(turns.owed_at(0ns), at(40s)) << "it is away already";
}

struct absence {
  time_point from, to;
};

/// The most that a job was away of any window: one that begins or ends where an absence does.
nanoseconds most_in_a_window(std::vector<absence> const& all, nanoseconds window) {
  auto const between = [&](time_point from, time_point to) {
    nanoseconds sum{0};
    for (auto const& each : all) {
      sum += std::max(nanoseconds{0}, std::min(each.to, to) - std::max(each.from, from));
    }
    return sum;
  };
  nanoseconds most{0};
  for (auto const& each : all) {
    most = std::max(
        {most, between(each.from, each.from + window), between(each.to - window, each.to)});
  }
  return most;
}

/// A job, and somebody who wants its memory at random instants and gives it back when it is owed, or before.
struct history {
  std::vector<absence> absences;
  nanoseconds swapping{0};
  nanoseconds longest_lateness{0};
  time_point end;
};

history played(turn_rules rules, std::uint64_t seed, nanoseconds longest_swap, nanoseconds lateness,
               bool same_swaps = false) {
  std::mt19937_64 random{seed};
  auto const up_to = [&random](nanoseconds limit) {
    return nanoseconds{
        static_cast<nanoseconds::rep>(random() % static_cast<std::uint64_t>(limit.count() + 1))};
  };
  parking_turns turns{rules};
  history made;
  auto now = at(0s);
  for (int i = 0; i < 300; ++i) {
    now = std::max(now, turns.stays_until());
    if (random() % 2 == 0) {  // else at the first instant at which it may be
      now += up_to(rules.window / 4);
    }
    auto const going = same_swaps ? longest_swap / 2 : up_to(longest_swap / 2);
    auto const coming = same_swaps ? longest_swap / 2 : up_to(longest_swap / 2);
    turns.left(now);
    turns.wanted(now);
    auto const late = up_to(lateness);
    auto const back = std::max(now + going, turns.owed_at(coming)) + coming + late;
    auto const before = turns.missed();
    auto const due = turns.owed_at(0ns);
    auto const early = random() % 4 == 0 ? now + going + coming : back;
    turns.came_back(early, going + coming);
    EXPECT_EQ(turns.missed() - before,
              std::max<nanoseconds>(0ns, early - std::max(due, now + going + coming)));
    made.absences.push_back({now, early});
    made.swapping += going + coming;
    made.longest_lateness = std::max(made.longest_lateness, early - due);
    now = early;
  }
  made.end = now;
  return made;
}

TEST(parking_turns, whatever_is_demanded_a_job_has_its_share_of_every_window) {
  for (double const share : {0.1, 0.5, 0.8}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      turn_rules const rules{.share = share, .window = 10s, .stay = 3};
      auto const made = played(rules, seed, 200ms, 0ns, true);
      EXPECT_LE(most_in_a_window(made.absences, rules.window),
                nanoseconds{std::llround((1.0 - share) * 10e9)})
          << "seed " << seed;
      EXPECT_LE(made.longest_lateness, 0s);
    }
  }
}

TEST(parking_turns, who_gives_back_late_costs_no_more_of_a_window_than_the_swap_and_the_lateness) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    turn_rules const rules{.share = 0.5, .window = 10s, .stay = 3};
    auto const made = played(rules, seed, 2s, 500ms);
    EXPECT_LE(most_in_a_window(made.absences, rules.window), 5s + 2s + 500ms) << "seed " << seed;
    EXPECT_GT(made.longest_lateness, 0s);
  }
}

TEST(parking_turns, swaps_take_no_more_of_all_time_than_one_in_stay_and_one) {
  for (std::uint32_t const stay : {1U, 3U, 10U}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      turn_rules const rules{.share = 0.5, .window = 10s, .stay = stay};
      auto const made = played(rules, seed, 400ms, 0ns);
      auto const all = made.end - at(0s) + stay * 400ms;  // that which follows the last
      EXPECT_LE(static_cast<double>(made.swapping.count()),
                static_cast<double>(all.count()) / (stay + 1.0))
          << "seed " << seed;
    }
  }
}

TEST(parking_turns, an_absence_that_may_begin_is_worth_its_swap) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    turn_rules const rules{.share = 0.7, .window = 10s, .stay = 1};
    std::mt19937_64 random{seed};
    parking_turns turns{rules};
    auto now = at(0s);
    for (int i = 0; i < 200; ++i) {
      auto const swap = nanoseconds{static_cast<nanoseconds::rep>(random() % 300'000'000 + 1)};
      now = std::max(now, turns.stays_until());
      turns.left(now);
      auto const due = turns.owed_at(0ns);
      EXPECT_GT(due, now);
      now = due;
      turns.came_back(now, swap);
      auto const next = turns.stays_until();
      parking_turns probe{turns};
      probe.left(next);
      EXPECT_GE(probe.owed_at(0ns) - next,
                std::min<nanoseconds>(parking_turns::absence_in_swaps * swap, 3s));
    }
  }
}

}  // namespace
}  // namespace sluice::scheduler
