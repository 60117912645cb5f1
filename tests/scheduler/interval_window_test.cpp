#include "scheduler/detail/interval_window.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

namespace sluice::scheduler::detail {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;
using time_point = interval_window::time_point;

time_point at(nanoseconds since_start) {
  return time_point{100h} + since_start;
}

TEST(interval_window, counts_what_of_the_window_is_in_intervals) {
  interval_window window{10s, 8};
  window.add({at(0s), at(2s)});
  window.add({at(5s), at(6s)});
  EXPECT_EQ(window.within(at(6s)), 3s);
  EXPECT_EQ(window.within(at(11s)), 2s) << "half of the first has left";
  EXPECT_EQ(window.within(at(5500ms)), 2500ms) << "the second has not ended then";
  EXPECT_EQ(window.within(at(60s)), 0s);
}

TEST(interval_window, the_longest_lasts_as_what_leaves_makes_room) {
  interval_window window{10s, 8};
  EXPECT_EQ(window.longest_from(at(0s), 4s), 4s);
  window.add({at(0s), at(4s)});
  EXPECT_EQ(window.longest_from(at(4s), 4s), 0s);
  EXPECT_EQ(window.longest_from(at(9s), 4s), 0s) << "before the first leaves nothing fits";
  EXPECT_EQ(window.longest_from(at(10s), 4s), 4s);
  EXPECT_EQ(window.longest_from(at(12s), 4s), 4s) << "from 14 s on it is alone";
}

TEST(interval_window, what_is_too_much_already_leaves_room_for_nothing) {
  interval_window window{10s, 8};
  window.add({at(0s), at(7s)});
  EXPECT_EQ(window.longest_from(at(8s), 4s), 0s);
  EXPECT_EQ(window.longest_from(at(11s), 4s), 0s) << "6 s of it are still there";
  EXPECT_EQ(window.first_with(4s, 4s), at(13s));
  EXPECT_EQ(window.longest_from(at(13s), 4s), 4s);
}

TEST(interval_window, the_first_instant_is_the_one_from_which_it_fits) {
  std::mt19937_64 random{7};
  auto const up_to = [&random](nanoseconds limit) {
    return nanoseconds{
        static_cast<nanoseconds::rep>(random() % static_cast<std::uint64_t>(limit.count()) + 1)};
  };
  for (int run = 0; run < 500; ++run) {
    interval_window window{1s, 64};
    auto const allowed = up_to(900ms);
    auto now = at(0s);
    for (int i = 0; i < 12; ++i) {
      now += up_to(200ms);
      auto const length = std::min(up_to(300ms), window.longest_from(now, allowed));
      window.add({now, now + length});
      now += length;
    }
    auto const wanted = up_to(allowed);
    auto const first = std::max(now, window.first_with(wanted, allowed));
    EXPECT_GE(window.longest_from(first, allowed), wanted);
    if (first > now) {
      EXPECT_LT(window.longest_from(first - 1ns, allowed), wanted);
    }
  }
}

TEST(interval_window, of_too_many_two_neighbours_become_one) {
  interval_window window{1h, 2};
  window.add({at(0s), at(1s)});
  window.add({at(2s), at(3s)});
  window.add({at(9s), at(10s)});
  EXPECT_EQ(window.within(at(10s)), 4s) << "with the second between the first two";
}

TEST(interval_window, what_meets_is_one_and_what_is_empty_is_none) {
  interval_window window{10s, 1};
  window.add({at(0s), at(1s)});
  window.add({at(1s), at(2s)});
  window.add({at(5s), at(5s)});
  EXPECT_EQ(window.within(at(10s)), 2s);
  EXPECT_EQ(window.first_with(1s, 5s), time_point::min());
}

TEST(interval_window, a_shorter_window_forgets) {
  interval_window window{10s, 8};
  window.add({at(0s), at(2s)});
  window.set_length(4s);
  EXPECT_EQ(window.within(at(5s)), 1s);
  window.forget_before(at(7s));
  window.set_length(100s);
  EXPECT_EQ(window.within(at(7s)), 0s);
}

}  // namespace
}  // namespace sluice::scheduler::detail
