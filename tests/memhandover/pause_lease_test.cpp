#include "memhandover/client/detail/pause_lease.hpp"

#include <gtest/gtest.h>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::detail {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr auto without_end = steady_clock::time_point::max();

class a_pause_lease : public testing::Test {
 protected:
  /// How far ahead the word is, at most: the instant is looked at before the word was written.
  [[nodiscard]] std::chrono::nanoseconds ahead(std::int64_t before) const {
    return std::chrono::nanoseconds{static_cast<std::int64_t>(word_.load()) - before};
  }

  std::atomic<std::uint64_t> word_{0};
  pause_lease lease_{word_, 1h};
};

TEST_F(a_pause_lease, holds_for_the_lease_and_no_longer_than_it_is_claimed) {
  auto const before = monotonic_ns();
  auto const claim = lease_.add(without_end);
  EXPECT_TRUE(lease_.claimed());
  EXPECT_GE(ahead(before), 1h);
  EXPECT_LE(ahead(monotonic_ns()), 1h);
  lease_.drop(claim);
  EXPECT_EQ(word_.load(), 0U);
  EXPECT_FALSE(lease_.claimed());
}

TEST_F(a_pause_lease, a_claim_ends_on_time_though_nobody_drops_it) {
  auto const end = steady_clock::now() + 1min;
  auto const claim = lease_.add(end);
  EXPECT_LE(ahead(monotonic_ns()), 1min);
  lease_.renew();
  EXPECT_LE(ahead(monotonic_ns()), 1min) << "renewing does not make it longer";
  lease_.drop(claim);

  auto const late = lease_.add(steady_clock::now() - 1ms);
  lease_.renew();
  EXPECT_LT(ahead(monotonic_ns()), 0ns);
  EXPECT_NE(word_.load(), 0U);
  lease_.drop(late);
}

TEST_F(a_pause_lease, holds_until_the_last_of_several_claims_ends) {
  auto const now = steady_clock::now();
  auto const longer = lease_.add(now + 10min);
  auto const before = monotonic_ns();
  auto const shorter = lease_.add(steady_clock::now() + 1min);
  EXPECT_GT(ahead(before), 9min);
  lease_.drop(longer);
  EXPECT_LE(ahead(monotonic_ns()), 1min);
  EXPECT_GT(word_.load(), 0U);
  auto const same = lease_.add(now + 1min);
  lease_.drop(shorter);
  EXPECT_TRUE(lease_.claimed());
  lease_.drop(same);
  EXPECT_EQ(word_.load(), 0U);
}

TEST_F(a_pause_lease, instants_beyond_the_clock_are_without_end) {
  auto const claim = lease_.add(without_end - 1ns);
  EXPECT_LE(ahead(monotonic_ns()), 1h);
  EXPECT_GT(ahead(monotonic_ns()), 59min);
  lease_.drop(claim);
}

}  // namespace
}  // namespace sluice::memhandover::detail
