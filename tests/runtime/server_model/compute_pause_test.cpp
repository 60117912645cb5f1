#include "runtime/server/hosting/detail/compute_pause.hpp"

#include <gtest/gtest.h>

#include <memory>

#include "tests/runtime/server_model/heap_pool.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using detail::compute_pause;
using clock = std::chrono::steady_clock;

constexpr auto never = clock::time_point::max();

/// A pause that leaves training a fifth of the time, on a clock that the test moves.
class a_pause : public ::testing::Test {
 protected:
  void go_to(std::chrono::milliseconds instant) { now_ = start + instant; }

  static constexpr clock::time_point start{100h};
  clock::time_point now_ = start;
  std::shared_ptr<heap_pool> pool_ = std::make_shared<heap_pool>(1);
  compute_pause pause_{pool_, 0.2, [this] { return now_; }};
};

TEST_F(a_pause, holds_launches_from_the_first_wish_until_it_is_released) {
  EXPECT_EQ(pause_.next_event(), never);
  pause_.want();
  pause_.want();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pool_->claimed_until(), start + 800ms);
  EXPECT_EQ(pause_.next_event(), start + 800ms);
  go_to(30ms);
  pause_.attend();
  EXPECT_EQ(pool_->claims(), 1);
  pause_.release();
  EXPECT_EQ(pool_->claims(), 0);
  EXPECT_EQ(pause_.next_event(), never);
  EXPECT_FALSE(pause_.wanted());
  auto const seen = pause_.counts();
  EXPECT_EQ(seen.pauses, 1U);
  EXPECT_EQ(seen.cut_short, 0U);
  EXPECT_EQ(seen.held, 30ms);
  EXPECT_EQ(seen.held_in_window, 30ms);
  EXPECT_EQ(seen.withheld, 0ms);
}

TEST_F(a_pause, goes_on_while_training_has_had_its_share) {
  pause_.want();
  go_to(810ms);  // whoever attends is late; the claim was not
  pause_.attend();
  EXPECT_EQ(pool_->claims(), 0);
  EXPECT_TRUE(pause_.wanted());
  EXPECT_EQ(pause_.next_event(), start + 1000ms);
  go_to(999ms);
  pause_.attend();
  EXPECT_EQ(pool_->claims(), 0);
  go_to(1010ms);
  pause_.attend();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pool_->claimed_until(), start + 1810ms);
  go_to(1100ms);
  auto const seen = pause_.counts();
  EXPECT_EQ(seen.pauses, 2U);
  EXPECT_EQ(seen.cut_short, 1U);
  EXPECT_EQ(seen.held, 890ms);
  EXPECT_EQ(seen.withheld, 210ms);
  EXPECT_EQ(seen.held_in_window, 790ms);
}

TEST_F(a_pause, released_late_is_counted_up_to_its_limit) {
  pause_.want();
  go_to(900ms);
  pause_.release();
  EXPECT_EQ(pause_.counts().held, 800ms);
  EXPECT_EQ(pause_.counts().withheld, 100ms);
  EXPECT_EQ(pause_.counts().cut_short, 1U);
  EXPECT_EQ(pool_->claims(), 0);
}

TEST_F(a_pause, wanted_when_nothing_is_left_begins_when_training_has_had_its_share) {
  pause_.want();
  go_to(800ms);
  pause_.release();
  go_to(850ms);
  pause_.want();
  EXPECT_EQ(pool_->claims(), 0);
  EXPECT_EQ(pause_.next_event(), start + 1000ms);
  go_to(1000ms);
  pause_.attend();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pause_.counts().withheld, 150ms);
  EXPECT_EQ(pause_.counts().pauses, 2U);
}

TEST_F(a_pause, given_up_while_training_has_its_share_does_not_come_back) {
  pause_.want();
  go_to(800ms);
  pause_.attend();
  go_to(900ms);
  pause_.release();
  EXPECT_EQ(pause_.next_event(), never);
  go_to(2s);
  pause_.attend();
  EXPECT_EQ(pool_->claims_ever(), 1);
}

TEST_F(a_pause, that_cannot_be_claimed_is_not_wanted_and_costs_nothing) {
  pool_->fail_claims(1);
  EXPECT_THROW(pause_.want(), error);
  EXPECT_FALSE(pause_.wanted());
  EXPECT_EQ(pause_.next_event(), never);
  go_to(10ms);
  pause_.want();
  EXPECT_EQ(pool_->claimed_until(), start + 810ms);
  EXPECT_EQ(pause_.counts().pauses, 1U);
}

TEST_F(a_pause, without_a_share_has_no_end) {
  compute_pause unlimited{pool_, 0.0, [this] { return now_; }};
  unlimited.want();
  EXPECT_EQ(pool_->claimed_until(), never);
  EXPECT_EQ(unlimited.next_event(), never);
  now_ = start + 10h;
  unlimited.attend();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(unlimited.counts().held, 10h);
}

}  // namespace
}  // namespace sluice::server::testing
