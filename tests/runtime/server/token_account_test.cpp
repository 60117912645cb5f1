#include "runtime/server/engines/token_account.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using clock = token_account::clock;

std::uint64_t count_of(token_distribution const& of) {
  return std::accumulate(of.counts.begin(), of.counts.end(), std::uint64_t{0});
}

TEST(token_account, first_tokens_and_gaps_are_counted_apart) {
  auto const now = clock::now();
  token_account account{{}, now};
  account.add(now, {.first = 1ms, .gaps = {}});
  account.add(now, {.first = std::nullopt, .gaps = {1001us, 100s, 0ns}});
  EXPECT_EQ(account.first().counts.front(), 1U);  // up to its bound
  EXPECT_EQ(count_of(account.first()), 1U);
  EXPECT_EQ(account.first().total, 1ms);
  EXPECT_EQ(account.gaps().counts[0], 1U);
  EXPECT_EQ(account.gaps().counts[1], 1U);
  EXPECT_EQ(account.gaps().counts.back(), 1U);  // beyond all
  EXPECT_EQ(account.gaps().total, 100s + 1001us);
}

TEST(token_account, what_is_promised_is_held_against_what_came_within_the_window) {
  auto const now = clock::now();
  policy::objective_policy promise;
  promise.window = 60s;
  promise.ttft = 100ms;
  promise.tbt = 20ms;
  token_account account{promise, now};
  EXPECT_FALSE(account.first_in_time(now));
  EXPECT_FALSE(account.gaps_in_time(now));
  account.add(now, {.first = 100ms, .gaps = {20ms, 21ms, 1ms, 30ms}});
  account.add(now, {.first = 101ms, .gaps = {}});
  EXPECT_DOUBLE_EQ(*account.first_in_time(now), 0.5);
  EXPECT_DOUBLE_EQ(*account.gaps_in_time(now), 0.5);
  EXPECT_FALSE(account.gaps_in_time(now + 120s));
  EXPECT_EQ(count_of(account.gaps()), 4U);  // these stay
}

TEST(token_account, without_a_promise_no_share_is_told) {
  auto const now = clock::now();
  token_account account{{}, now};
  account.add(now, {.first = 1ms, .gaps = {1ms}});
  EXPECT_FALSE(account.first_in_time(now));
  EXPECT_FALSE(account.gaps_in_time(now));
}

}  // namespace
}  // namespace sluice::server
