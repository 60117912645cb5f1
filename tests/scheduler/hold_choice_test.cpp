#include "scheduler/hold_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;

constexpr nanoseconds change = 200us;

nanoseconds cost_of(std::vector<nanoseconds> const& gaps, nanoseconds hold) {
  nanoseconds sum{};
  for (auto const gap : gaps) {
    sum += gap <= hold ? gap : hold + change;
  }
  return sum;
}

nanoseconds chosen_for(std::vector<nanoseconds> const& gaps) {
  hold_choice choice{change};
  for (auto const gap : gaps) {
    choice.add(gap);
  }
  return choice.hold();
}

TEST(hold_choice, holds_for_as_long_as_a_change_takes_while_nothing_is_known) {
  EXPECT_EQ(hold_choice{change}.hold(), change);
}

TEST(hold_choice, lets_go_at_once_where_gaps_are_long) {
  EXPECT_EQ(chosen_for({20ms, 7ms, 400ms, 3ms}), 0ns);
}

TEST(hold_choice, waits_for_gaps_that_are_short) {
  EXPECT_EQ(chosen_for({30us, 50us, 20us}), 50us);
}

TEST(hold_choice, waits_for_the_short_ones_among_the_long) {
  EXPECT_EQ(chosen_for({30us, 50us, 20us, 40us, 9ms}), 50us);
  EXPECT_EQ(chosen_for({150us, 9ms, 8ms, 9ms, 7ms}), 0ns) << "too few of them";
}

TEST(hold_choice, forgets_what_is_long_ago) {
  hold_choice choice{change};
  for (std::size_t i = 0; i < 1000; ++i) {
    choice.add(10us);
  }
  EXPECT_EQ(choice.hold(), 10us);
  for (std::size_t i = 0; i < hold_choice::remembered; ++i) {
    choice.add(50ms);
  }
  EXPECT_EQ(choice.hold(), 0ns);
}

TEST(hold_choice, takes_whatever_length_a_gap_has) {
  EXPECT_EQ(chosen_for({-5us}), 0ns);
  EXPECT_EQ(chosen_for(std::vector<nanoseconds>(64, nanoseconds::max())), 0ns);
  EXPECT_THROW(hold_choice{0ns}, std::invalid_argument);
}

// Whatever gaps there were, no other time would have cost less for them.
TEST(hold_choice, is_the_cheapest_for_the_gaps_that_it_knows) {
  std::mt19937_64 random{7};
  std::lognormal_distribution<double> lengths{4.5, 1.5};  // µs; a median of 90
  for (int round = 0; round < 200; ++round) {
    std::vector<nanoseconds> gaps(1 + random() % hold_choice::remembered);
    std::generate(gaps.begin(), gaps.end(), [&] {
      return nanoseconds{static_cast<nanoseconds::rep>(1e3 * lengths(random))};
    });
    auto const cost = cost_of(gaps, chosen_for(gaps));
    EXPECT_LE(cost, cost_of(gaps, 0ns));
    for (auto const other : gaps) {
      EXPECT_LE(cost, cost_of(gaps, other)) << other.count();
    }
  }
}

// A Poisson process: nothing is to be had by waiting, unless work comes in less than a change.
TEST(hold_choice, does_not_wait_for_arrivals_that_are_rarer_than_changes) {
  std::mt19937_64 random{11};
  std::exponential_distribution<double> gaps{1.0 / 20e6};  // ns: 20 ms
  hold_choice choice{change};
  nanoseconds in_vain{};
  constexpr int many = 2000;
  for (int i = 0; i < many; ++i) {
    choice.add(nanoseconds{static_cast<nanoseconds::rep>(gaps(random))});
    in_vain += choice.hold();
  }
  EXPECT_LT(in_vain / many, 20us);
}

}  // namespace
}  // namespace sluice::scheduler
