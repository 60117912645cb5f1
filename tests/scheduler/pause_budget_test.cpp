#include "scheduler/pause_budget.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;
using time_point = pause_budget::time_point;

time_point at(nanoseconds since_start) {
  return time_point{100h} + since_start;
}

struct held {
  time_point from, to;
  nanoseconds before;  ///< the sum of earlier ones
};

/// A budget, and what was really held under it.
class run {
 public:
  run(double min_share, nanoseconds window) : window_(window), budget_(min_share, window) {}

  pause_budget& budget() noexcept { return budget_; }

  /// Wants to hold from `from` to `to`. Holds once, as long as it may; returns until when it did.
  time_point want(time_point from, time_point to) {
    auto const limit = budget_.begin(from);
    if (limit <= from) {
      return from;
    }
    auto const end = std::min(limit, to);
    budget_.end(end);
    auto const before = pauses_.empty()
                            ? nanoseconds{0}
                            : pauses_.back().before + (pauses_.back().to - pauses_.back().from);
    pauses_.push_back({from, end, before});
    return end;
  }

  /// The same, again and again whenever it may.
  void want_all(time_point from, time_point to) {
    for (auto now = from; now < to;) {
      auto const end = want(now, to);
      if (end == now) {
        EXPECT_GT(budget_.next_begin(), now);
      }
      now = end > now ? end : budget_.next_begin();
    }
  }

  [[nodiscard]] nanoseconds held_between(time_point from, time_point to) const {
    return held_before(to) - held_before(from);
  }

  /// The most that was held in any window: one that begins or ends where a pause does, since between
  /// these what is held changes linearly.
  [[nodiscard]] nanoseconds most_in_a_window() const {
    nanoseconds most{0};
    for (auto const& each : pauses_) {
      for (auto const edge : {each.from, each.to}) {
        most = std::max(
            {most, held_between(edge, edge + window_), held_between(edge - window_, edge)});
      }
    }
    return most;
  }

 private:
  [[nodiscard]] nanoseconds held_before(time_point end) const {
    auto const later =
        std::upper_bound(pauses_.begin(), pauses_.end(), end,
                         [](time_point value, held const& each) { return value < each.from; });
    if (later == pauses_.begin()) {
      return nanoseconds{0};
    }
    auto const& last = *std::prev(later);
    return last.before + std::min(last.to, end) - last.from;
  }

  nanoseconds window_;
  pause_budget budget_;
  std::vector<held> pauses_;
};

TEST(pause_budget, holds_for_the_windows_share_and_no_longer) {
  run requests{0.2, 1s};
  EXPECT_EQ(requests.want(at(0ms), at(5s)), at(800ms));
  EXPECT_EQ(requests.want(at(800ms), at(5s)), at(800ms)) << "nothing is left";
  EXPECT_EQ(requests.budget().next_begin(), at(1000ms));
  EXPECT_EQ(requests.want(at(999ms), at(5s)), at(999ms));
  EXPECT_EQ(requests.want(at(1000ms), at(5s)), at(1800ms)) << "what leaves the window comes in";
}

TEST(pause_budget, short_pauses_are_not_limited_while_their_sum_is_small) {
  run requests{0.5, 1s};
  for (auto now = 0ms; now < 3s; now += 10ms) {
    EXPECT_EQ(requests.want(at(now), at(now + 4ms)), at(now + 4ms));
  }
}

TEST(pause_budget, a_pause_may_last_while_older_ones_leave_the_window) {
  run requests{0.5, 1s};
  EXPECT_EQ(requests.want(at(0ms), at(200ms)), at(200ms));
  EXPECT_EQ(requests.want(at(300ms), at(400ms)), at(400ms));
  // 200 ms are left; they last until 1100 ms, when the pause at 0 has left since 1000 ms and the next
  // one leaves from 1300 ms on.
  EXPECT_EQ(requests.want(at(900ms), at(9s)), at(1400ms));
  EXPECT_EQ(requests.most_in_a_window(), 500ms);
}

TEST(pause_budget, comes_back_in_pieces_worth_having_once_it_is_used_up) {
  run requests{0.6, 1s};
  for (auto now = 0ms; now < 790ms; now += 20ms) {
    (void)requests.want(at(now), at(now + 10ms));
  }
  EXPECT_EQ(requests.held_between(at(0ms), at(1s)), 400ms);
  EXPECT_EQ(requests.want(at(800ms), at(2s)), at(800ms));
  // A piece of 10 ms could be had at 1000 ms; an eighth of 400 ms takes four more of them.
  auto const next = requests.budget().next_begin();
  EXPECT_EQ(requests.want(next - 1ns, at(2s)), next - 1ns);
  EXPECT_GE(requests.want(next, at(2s)), next + 50ms);
}

TEST(pause_budget, without_a_share_there_is_no_limit) {
  pause_budget budget{0.0};
  EXPECT_EQ(budget.begin(at(0s)), time_point::max());
  budget.end(at(10h));
  EXPECT_EQ(budget.held_in_window(at(10h)), 1s);
  EXPECT_LE(budget.next_begin(), at(10h));
  EXPECT_EQ(budget.begin(at(10h)), time_point::max());
}

TEST(pause_budget, with_the_whole_share_nothing_is_ever_held) {
  pause_budget budget{1.0};
  EXPECT_LE(budget.begin(at(0s)), at(0s));
  EXPECT_FALSE(budget.held());
  EXPECT_EQ(budget.next_begin(), time_point::max());
}

TEST(pause_budget, what_lies_beyond_the_limit_was_not_held) {
  pause_budget budget{0.5, 1s};
  EXPECT_EQ(budget.begin(at(0s)), at(500ms));
  EXPECT_EQ(budget.begin(at(100ms)), at(500ms)) << "it is held already";
  budget.end(at(700ms));
  budget.end(at(800ms));
  EXPECT_EQ(budget.held_in_window(at(1s)), 500ms);
  EXPECT_EQ(budget.held_in_window(at(1200ms)), 300ms);
}

TEST(pause_budget, instants_out_of_order_count_as_simultaneous) {
  pause_budget budget{0.5, 1s};
  EXPECT_EQ(budget.begin(at(10ms)), at(510ms));
  budget.end(at(5ms));
  EXPECT_EQ(budget.held_in_window(at(20ms)), 0ms);
  EXPECT_EQ(budget.begin(at(1ms)), at(510ms));
}

TEST(pause_budget, refuses_shares_and_windows_that_are_none) {
  EXPECT_THROW(pause_budget{-0.1}, std::invalid_argument);
  EXPECT_THROW(pause_budget{1.1}, std::invalid_argument);
  EXPECT_THROW(pause_budget{std::numeric_limits<double>::quiet_NaN()}, std::invalid_argument);
  EXPECT_THROW(pause_budget(0.5, 0ns), std::invalid_argument);
}

TEST(pause_budget, load_that_never_ends_leaves_training_its_share_and_not_much_more) {
  for (double const share : {0.01, 0.05, 0.3, 0.5, 0.9, 0.99}) {
    run requests{share, 1s};
    requests.want_all(at(0s), at(60s));
    auto const permitted = std::chrono::duration<double>{60.0 * (1.0 - share)};
    EXPECT_LE(requests.most_in_a_window(), std::chrono::duration<double>{1.0 - share} + 1ns);
    EXPECT_NEAR(std::chrono::duration<double>{requests.held_between(at(0s), at(60s))}.count(),
                permitted.count(), 1.0);
  }
}

// More pauses in a window than are remembered: some count for longer than they were.
TEST(pause_budget, more_pauses_than_it_remembers_take_nothing_from_training) {
  run requests{0.5, 1s};
  for (auto now = 0us; now < 4s; now += 400us) {
    (void)requests.want(at(now), at(now + 390us));
  }
  EXPECT_LE(requests.most_in_a_window(), 500ms);
  EXPECT_GT(requests.held_between(at(0s), at(4s)), 1s);
}

/// Random requests, bursts and silences of all lengths, with random shares and windows.
TEST(pause_budget, whatever_requests_come_every_window_keeps_trainings_share) {
  std::mt19937_64 random{20240607};
  auto const up_to = [&](std::int64_t most) {
    return nanoseconds{static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most)) + 1};
  };
  // From a nanosecond to `most`, each order of magnitude as often.
  auto const of_any_length = [&](std::int64_t most) {
    return up_to(std::max<std::int64_t>(1, most >> random() % 30));
  };
  for (int round = 0; round < 400; ++round) {
    auto const window = of_any_length(4'000'000'000) + 10ns;
    auto const share = static_cast<double>(random() % 1001) / 1000.0;
    auto const allowed =
        window.count() -
        static_cast<std::int64_t>(std::ceil(share * static_cast<double>(window.count())));
    run requests{share, window};
    auto now = at(0s);
    for (int event = 0; event < 200; ++event) {
      auto const end = now + of_any_length(2 * window.count());
      if (random() % 4 != 0) {
        (void)requests.want(now, end);
      } else if (allowed > 0) {
        // A backlog that takes every nanosecond it gets, for a few windows at most.
        requests.want_all(now, std::min(end, now + 3 * window));
      }
      if (allowed > 0) {
        ASSERT_LE(requests.budget().next_begin(), std::max(now, end) + window) << "round " << round;
      }
      now = end + of_any_length(2 * window.count());
    }
    ASSERT_LE(requests.most_in_a_window().count(), allowed)
        << "round " << round << " share " << share << " window " << window.count() << " ns";
  }
}

}  // namespace
}  // namespace sluice::scheduler
