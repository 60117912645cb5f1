#include "runtime/server/hosting/compute_lease.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/runtime/server_model/heap_pool.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// A lease that leaves training a fifth of the time, on a clock that the test moves.
class a_lease : public ::testing::Test {
 protected:
  void go_to(std::chrono::microseconds instant) { now_ = start + instant; }
  void burst(std::chrono::microseconds from, std::chrono::microseconds until, bool waited = true) {
    go_to(from);
    lease_.begins();
    go_to(until);
    lease_.drained(waited);
  }
  /// Bursts of a millisecond with such gaps between them, until the lease knows nothing else.
  std::chrono::microseconds after_gaps_of(std::chrono::microseconds gap, bool waited = true) {
    std::chrono::microseconds at{};
    for (std::size_t i = 0; i <= scheduler::hold_choice::remembered; ++i) {
      burst(at, at + 1ms, waited);
      at += 1ms + gap;
    }
    return at - gap;
  }

  static constexpr clock::time_point start{100h};
  clock::time_point now_ = start;
  std::shared_ptr<heap_pool> pool_ = std::make_shared<heap_pool>(1);
  compute_lease lease_{pool_, 0.2, compute_lease::change_on_gpu, [this] { return now_; }};
};

TEST_F(a_lease, claims_the_device_from_the_first_launch_on) {
  EXPECT_EQ(pool_->claims(), 0);
  lease_.begins();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pool_->claimed_until(), start + 800ms) << "as far as training's share permits";
}

TEST_F(a_lease, holds_on_for_a_change_while_it_knows_no_gaps) {
  burst(0us, 1000us);
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pool_->claimed_until(), start + 1ms + compute_lease::change_on_gpu);
  go_to(2ms);
  lease_.attend();
  EXPECT_EQ(pool_->claims(), 0);
  EXPECT_EQ(lease_.counts().held, 1ms + compute_lease::change_on_gpu);
}

TEST_F(a_lease, lets_go_at_once_where_the_next_work_is_far) {
  (void)after_gaps_of(10ms);
  EXPECT_EQ(pool_->claims(), 0);
}

TEST_F(a_lease, holds_on_where_the_next_work_is_near) {
  auto const end = after_gaps_of(40us);
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(pool_->claimed_until(), start + end + 40us);
  go_to(end + 30us);
  lease_.begins();
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_GT(pool_->claimed_until(), start + end + 40us);
}

TEST_F(a_lease, tells_gaps_of_requests_from_those_of_slow_launches) {
  (void)after_gaps_of(40us, false);
  auto const end = std::chrono::duration_cast<std::chrono::microseconds>(now_ - start);
  for (int i = 1; i <= 100; ++i) {
    burst(end + i * 10ms, end + i * 10ms + 1ms);
  }
  EXPECT_EQ(pool_->claims(), 0) << "after work that was waited for";
  burst(end + 2s, end + 2s + 1ms, false);
  EXPECT_EQ(pool_->claims(), 1) << "after a device that ran dry";
}

TEST_F(a_lease, tells_gaps_before_a_request_that_waits_from_those_before_none) {
  lease_.set_more_waits(true);
  (void)after_gaps_of(40us);
  auto const end = std::chrono::duration_cast<std::chrono::microseconds>(now_ - start);
  lease_.set_more_waits(false);
  for (int i = 1; i <= 100; ++i) {
    burst(end + i * 10ms, end + i * 10ms + 1ms);
  }
  EXPECT_EQ(pool_->claims(), 0);
  lease_.set_more_waits(true);
  burst(end + 2s, end + 2s + 1ms);
  EXPECT_EQ(pool_->claims(), 1);
}

TEST_F(a_lease, announces_when_the_next_launch_is_expected) {
  lease_.announce();
  EXPECT_EQ(pool_->announced_within(), 750us);
  for (int i = 0; i < 100; ++i) {
    go_to(i * 10ms);
    lease_.announce();
    burst(i * 10ms + 100us, i * 10ms + 1ms);
  }
  go_to(2s);
  lease_.announce();
  EXPECT_NEAR(static_cast<double>(pool_->announced_within().count()), 150e3, 5e3);
  EXPECT_EQ(pool_->announcements(), 102);
  lease_.begins();
  lease_.announce();
  EXPECT_EQ(pool_->announcements(), 102) << "what works is claimed already";
}

TEST_F(a_lease, expects_an_engine_by_what_engines_have_taken) {
  for (int i = 0; i < 100; ++i) {
    go_to(i * 100ms);
    lease_.announce(compute_lease::worker::engines);
    go_to(i * 100ms + 8ms);
    lease_.begins(compute_lease::worker::engines);
    go_to(i * 100ms + 9ms);
    lease_.drained(true, compute_lease::worker::engines);
  }
  go_to(20s);
  lease_.announce(compute_lease::worker::engines);
  EXPECT_NEAR(static_cast<double>(pool_->announced_within().count()), 12e6, 1e5);
  EXPECT_EQ(lease_.counts().announced, 101U);
  go_to(21s);
  lease_.announce();
  EXPECT_EQ(pool_->announced_within(), 750us) << "a model is expected as before";
}

TEST_F(a_lease, counts_work_with_the_short_gaps_in_it) {
  burst(0us, 1000us);
  burst(1100us, 2000us);
  burst(5000us, 6000us);
  EXPECT_EQ(lease_.counts().busy, 3ms);
  go_to(10ms);
  lease_.begins();
  go_to(11ms);
  EXPECT_EQ(lease_.counts().busy, 4ms) << "with what is under way";
}

TEST_F(a_lease, of_work_that_never_ends_ends_where_trainings_share_begins_and_comes_again) {
  int calls = 0;
  lease_.set_waker([&calls] { ++calls; });
  EXPECT_EQ(lease_.attended_by(start + 10s), start + 10s);
  lease_.begins();
  EXPECT_EQ(calls, 1) << "somebody has to look sooner";
  EXPECT_EQ(lease_.attended_by(start + 10s), start + 800ms);
  go_to(800ms);
  lease_.attend();
  EXPECT_EQ(pool_->claims(), 0);
  EXPECT_EQ(lease_.counts().cut_short, 1U);
  EXPECT_EQ(lease_.attended_by(start + 10s), start + 1s);
  go_to(1s);
  lease_.attend();
  EXPECT_EQ(pool_->claims(), 1);
  go_to(1100ms);
  lease_.drained(true);
  go_to(2s);
  lease_.attend();
  EXPECT_EQ(pool_->claims(), 0);
}

TEST_F(a_lease, a_second_beginning_and_a_second_end_change_nothing) {
  lease_.begins();
  go_to(300us);
  lease_.begins();
  go_to(500us);
  lease_.drained(true);
  lease_.drained(true);
  EXPECT_EQ(lease_.counts().busy, 500us);
  EXPECT_EQ(lease_.counts().pauses, 1U);
}

TEST_F(a_lease, goes_on_without_a_claim_that_cannot_be_had) {
  pool_->fail_claims(1);
  EXPECT_THROW(lease_.begins(), error);
  EXPECT_EQ(pool_->claims(), 0);
  lease_.drained(true);
  go_to(5ms);
  lease_.begins();
  EXPECT_EQ(pool_->claims(), 1);
}

TEST_F(a_lease, says_who_attends_that_it_has_to_be_sooner) {
  lease_.set_waker([] { ADD_FAILURE() << "it has been said already"; });
  EXPECT_EQ(lease_.attended_by(start + 10s), start + 10s);
  EXPECT_TRUE(lease_.begins_here());
  EXPECT_FALSE(lease_.begins_here()) << "nothing new has begun";
}

TEST_F(a_lease, lasts_as_long_as_models_or_engines_work) {
  using worker = compute_lease::worker;
  lease_.begins(worker::engines);
  go_to(1ms);
  lease_.begins();
  go_to(2ms);
  lease_.drained(true, worker::engines);
  EXPECT_EQ(pool_->claimed_until(), start + 800ms) << "a model works";
  lease_.drained(true, worker::engines);
  lease_.drained(true);
  EXPECT_EQ(pool_->claimed_until(), start + 2ms + compute_lease::change_on_gpu);
  EXPECT_EQ(lease_.counts().pauses, 1U);
  EXPECT_EQ(lease_.counts().busy, 2ms);
}

// Under ThreadSanitizer as well.
TEST(lease_of_threads, is_free_when_all_have_ended) {
  auto const pool = std::make_shared<heap_pool>(1);
  compute_lease lease{pool, 0.0, compute_lease::change_on_gpu};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&lease] {
        for (int round = 0; round < 200; ++round) {
          lease.begins();
          std::this_thread::yield();
          lease.drained(round % 2 == 0);
        }
      });
    }
  }
  lease.release();
  EXPECT_EQ(pool->claims(), 0);
  EXPECT_FALSE(lease.wanted());
}

}  // namespace
}  // namespace sluice::server::testing
