#include "memhandover/device/chunk_transfer.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <vector>

#include "memhandover/base/error.hpp"
#include "tests/memhandover/slow_driver.hpp"

namespace sluice::memhandover {
namespace {

class chunk_transfer_test : public testing::Test {
 protected:
  static constexpr std::size_t window = chunk_transfer::window;

  void give(chunk_transfer& ring, std::size_t copies) {
    for (std::size_t i = 0; i < copies; ++i) {
      ring.out(here_.data(), there_.data(), here_.size());
    }
  }

  std::shared_ptr<cuda_driver> driver_ = make_slow_driver();
  std::vector<std::byte> there_ = std::vector<std::byte>(64, std::byte{5});
  std::vector<std::byte> here_ = std::vector<std::byte>(64);
};

TEST_F(chunk_transfer_test, copies_of_the_host_end_at_once) {
  auto const ring = open_chunk_transfer(nullptr);
  give(*ring, 1);
  EXPECT_EQ(ring->in_flight(), 1U);
  EXPECT_EQ(here_, there_);
  EXPECT_EQ(ring->poll(), 1U);
  EXPECT_EQ(ring->poll(), 0U);
}

TEST_F(chunk_transfer_test, no_more_than_the_window_is_in_flight_and_the_others_wait) {
  auto const ring = open_chunk_transfer(driver_);
  give(*ring, window + 3);
  EXPECT_EQ(ring->in_flight(), window);
  EXPECT_EQ(ring->waiting(), 3U);
  EXPECT_EQ(slow.work.size(), window);
  slow.run(2);
  EXPECT_EQ(ring->poll(), 2U);
  EXPECT_EQ(ring->in_flight(), window);
  EXPECT_EQ(ring->waiting(), 1U);
}

TEST_F(chunk_transfer_test, what_has_not_begun_can_be_dropped) {
  auto const ring = open_chunk_transfer(driver_);
  give(*ring, window + 3);
  EXPECT_EQ(ring->drop(), 3U);
  EXPECT_EQ(ring->drop(), 0U);
  slow.run(window + 3);
  EXPECT_EQ(ring->poll(), window);
  EXPECT_EQ(ring->in_flight(), 0U);
  EXPECT_EQ(slow.done, window);
}

TEST_F(chunk_transfer_test, copies_are_counted_in_the_order_they_were_given) {
  auto const ring = open_chunk_transfer(driver_);
  for (int begun = 0; begun < 50; ++begun) {
    ring->in(there_.data(), here_.data(), here_.size());
    if (begun < 2) {
      EXPECT_EQ(ring->poll(), 0U);
      continue;
    }
    slow.run(1);
    EXPECT_EQ(ring->poll(), 1U);
    EXPECT_EQ(ring->in_flight(), 2U);
  }
  slow.run(2);
  EXPECT_EQ(ring->poll(), 2U);
  EXPECT_EQ(here_, there_);
}

TEST_F(chunk_transfer_test, no_call_breaks_a_capture) {
  auto ring = open_chunk_transfer(driver_);
  give(*ring, window + 1);
  slow.run(1);
  EXPECT_EQ(ring->poll(), 1U);
  ring->abandon();
  give(*ring, 1);
  ring = nullptr;
  EXPECT_GT(slow.calls, 2 * window);
  EXPECT_EQ(slow.unrelaxed, 0);
}

TEST_F(chunk_transfer_test, a_failure_at_any_call_leaves_no_copy_at_work) {
  auto const expect_end = [](std::uint64_t at) {
    EXPECT_EQ(slow.work.size(), 0U) << at;
    EXPECT_EQ(slow.streams, 0) << at;
    EXPECT_EQ(slow.events, 0) << at;
  };
  auto const round = [this] {
    auto const ring = open_chunk_transfer(driver_);
    std::size_t counted = 0;
    try {
      give(*ring, 2 * window);
      while (ring->in_flight() > 0) {
        slow.run(3);
        counted += ring->poll();
        EXPECT_LE(counted, slow.done);
      }
    } catch (error const&) {
      EXPECT_EQ(slow.work.size(), 0U);
      EXPECT_EQ(ring->in_flight() + ring->waiting() + ring->poll(), 0U);
      throw;
    }
    EXPECT_EQ(counted, 2 * window);
    give(*ring, 2);  // which are in flight at the end
  };
  round();
  auto const calls = slow.calls;
  expect_end(calls);
  ASSERT_GE(calls, 4 * window);
  std::uint64_t thrown = 0;
  for (std::uint64_t at = 0; at < calls; ++at) {
    for (std::uint64_t const failures : {1U, 2U}) {
      driver_ = make_slow_driver();
      slow.fails_at = at;
      slow.failures = failures;
      try {
        round();
      } catch (error const&) {
        ++thrown;
      }
      expect_end(at);
    }
  }
  EXPECT_GT(thrown, calls) << "of twice as many; a query may be made again";
}

TEST_F(chunk_transfer_test, a_copy_that_no_event_follows_is_waited_for) {
  auto const ring = open_chunk_transfer(driver_);
  give(*ring, 2);
  slow.fails_at = slow.calls + 1;
  EXPECT_THROW(give(*ring, 1), error);
  EXPECT_EQ(slow.done, 3U);
}

TEST_F(chunk_transfer_test, what_was_abandoned_is_never_counted) {
  for (auto const& driver : {std::shared_ptr<cuda_driver>{}, driver_}) {
    auto const ring = open_chunk_transfer(driver);
    give(*ring, window + 3);
    ring->abandon();
    EXPECT_EQ(slow.work.size(), 0U);
    EXPECT_EQ(ring->in_flight() + ring->waiting(), 0U);
    EXPECT_EQ(ring->poll(), 0U);
    give(*ring, 1);
    slow.run(1);
    EXPECT_EQ(ring->poll(), 1U);
  }
}

TEST_F(chunk_transfer_test, copies_that_have_ended_count_before_a_failure) {
  auto const ring = open_chunk_transfer(driver_);
  give(*ring, 3);
  slow.run(2);
  slow.fails_at = slow.calls + 2;
  slow.failure = CUDA_ERROR_ILLEGAL_ADDRESS;
  slow.failures = 1000;
  EXPECT_EQ(ring->poll(), 2U);
  EXPECT_THROW((void)ring->poll(), error) << "nothing is waited for: the context has failed";
  EXPECT_EQ(ring->in_flight(), 0U);
}

TEST_F(chunk_transfer_test, a_process_that_cannot_know_when_a_copy_ends_is_ended) {
  auto ring = open_chunk_transfer(driver_);
  give(*ring, 1);
  slow.failures = 1000;
  slow.fails_at = slow.calls;
  EXPECT_EXIT(ring = nullptr, testing::KilledBySignal(SIGABRT), "");
  slow.failures = 0;
}

TEST_F(chunk_transfer_test, a_driver_without_copies_is_refused_by_name) {
  driver_->cuEventQuery = nullptr;
  try {
    (void)open_chunk_transfer(driver_);
    FAIL();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unsupported);
    EXPECT_STREQ(why.what(), "nothing can be parked: the driver lacks cuEventQuery");
  }
}

}  // namespace
}  // namespace sluice::memhandover
