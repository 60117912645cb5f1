#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/device/content_hash.hpp"
#include "tests/memhandover/slow_driver.hpp"

namespace sluice::memhandover {
namespace {

class content_hasher_test : public testing::Test {
 protected:
  static constexpr std::size_t window = content_hasher::window;

  struct alignas(16) chunk {
    std::byte bytes[64];
  };

  content_hasher_test() {
    for (std::size_t i = 1; i < chunks_.size(); ++i) {
      chunks_[i].bytes[i % 64] = static_cast<std::byte>(i);
    }
  }

  void begin(content_hasher& hasher, std::size_t first, std::size_t count) const {
    for (auto i = first; i < first + count; ++i) {
      hasher.begin(chunks_[i].bytes, sizeof(chunk));
    }
  }

  std::shared_ptr<cuda_driver> driver_ = make_slow_driver();
  std::vector<chunk> chunks_ = std::vector<chunk>(3 * window);
};

TEST_F(content_hasher_test, hashes_come_in_the_order_in_which_chunks_were_begun) {
  for (auto const& driver : {std::shared_ptr<cuda_driver>{}, driver_}) {
    auto const hasher = open_content_hasher(driver);
    ASSERT_TRUE(hasher->available());
    EXPECT_EQ(hasher->poll(), std::nullopt);
    std::size_t begun = 0;
    for (std::size_t said = 0; said < chunks_.size(); ++said) {
      while (begun < chunks_.size() && hasher->room()) {
        begin(*hasher, begun++, 1);
      }
      if (driver != nullptr) {
        EXPECT_EQ(hasher->poll(), std::nullopt) << "the device is at it";
        slow.run(1);
      }
      EXPECT_EQ(hasher->poll(), hash_contents(chunks_[said].bytes)) << said;
    }
    EXPECT_EQ(hasher->in_flight(), 0U);
  }
}

TEST_F(content_hasher_test, what_cannot_be_hashed_is_refused) {
  for (auto const& driver : {std::shared_ptr<cuda_driver>{}, driver_}) {
    auto const hasher = open_content_hasher(driver);
    EXPECT_THROW(hasher->begin(chunks_[0].bytes, 40), error);
    EXPECT_THROW(hasher->begin(chunks_[0].bytes + 8, 48), error);
    begin(*hasher, 0, window);
    EXPECT_FALSE(hasher->room());
    EXPECT_THROW(begin(*hasher, 0, 1), error);
    EXPECT_EQ(hasher->in_flight(), window);
  }
}

TEST_F(content_hasher_test, what_was_abandoned_is_never_said) {
  for (auto const& driver : {std::shared_ptr<cuda_driver>{}, driver_}) {
    auto const hasher = open_content_hasher(driver);
    begin(*hasher, 0, 3);
    hasher->abandon();
    EXPECT_EQ(slow.work.size(), 0U);
    EXPECT_EQ(hasher->in_flight(), 0U);
    EXPECT_EQ(hasher->poll(), std::nullopt);
    begin(*hasher, 5, 1);
    slow.run(1);
    EXPECT_EQ(hasher->poll(), hash_contents(chunks_[5].bytes));
  }
}

TEST_F(content_hasher_test, no_call_breaks_a_capture) {
  auto hasher = open_content_hasher(driver_);
  begin(*hasher, 0, window);
  slow.run(1);
  EXPECT_NE(hasher->poll(), std::nullopt);
  hasher->abandon();
  begin(*hasher, 0, 1);
  hasher = nullptr;
  EXPECT_GT(slow.calls, 2 * window);
  EXPECT_EQ(slow.unrelaxed, 0);
}

TEST_F(content_hasher_test, without_its_kernel_it_is_not_available_and_says_why) {
  auto const calls = [this] {
    (void)open_content_hasher(driver_);
    return slow.calls;
  }();
  ASSERT_GE(calls, window + 4);
  for (std::uint64_t at = 0; at < calls; ++at) {
    driver_ = make_slow_driver();
    slow.fails_at = at;
    auto const hasher = open_content_hasher(driver_);
    EXPECT_FALSE(hasher->available());
    EXPECT_EQ(hasher->refusal().find("clean and zero chunks are not found"), 0U);
    EXPECT_THROW(begin(*hasher, 0, 1), error);
    EXPECT_EQ(hasher->poll(), std::nullopt);
    hasher->abandon();
    EXPECT_EQ(slow.streams + slow.events + slow.modules + slow.allocations, 0) << at;
  }
}

TEST_F(content_hasher_test, a_driver_that_lacks_a_function_is_no_error) {
  driver_->cuLaunchKernel = nullptr;
  EXPECT_EQ(open_content_hasher(driver_)->refusal(),
            "clean and zero chunks are not found: the driver lacks cuLaunchKernel");
  EXPECT_EQ(slow.calls, 0U);
}

TEST_F(content_hasher_test, a_failure_at_any_call_leaves_no_kernel_at_work) {
  std::uint64_t opened = 0;
  auto const round = [&] {
    auto const hasher = open_content_hasher(driver_);
    opened = opened == 0 ? slow.calls : opened;
    ASSERT_TRUE(hasher->available());
    try {
      begin(*hasher, 0, 3);
      slow.run(1);
      EXPECT_NE(hasher->poll(), std::nullopt);
      slow.run(1);
      EXPECT_NE(hasher->poll(), std::nullopt);
    } catch (error const&) {
      EXPECT_EQ(slow.work.size(), 0U);
      EXPECT_EQ(hasher->in_flight(), 0U);
      begin(*hasher, 7, 1);  // it can be used on
      slow.run(1);
      EXPECT_EQ(hasher->poll(), hash_contents(chunks_[7].bytes));
      throw;
    }
  };
  round();
  auto const calls = slow.calls;
  EXPECT_EQ(slow.work.size(), 0U) << "what is in flight at the end is waited for";
  ASSERT_GE(calls, opened + 8);
  std::size_t failed = 0;
  for (auto at = opened; at < calls; ++at) {
    driver_ = make_slow_driver();
    slow.fails_at = at;
    try {
      round();
    } catch (error const&) {
      ++failed;
    }
    EXPECT_EQ(slow.work.size(), 0U) << at;
    EXPECT_EQ(slow.streams + slow.events + slow.modules + slow.allocations, 0) << at;
  }
  EXPECT_EQ(failed, calls - opened - 1) << "all but where the driver is asked again";
}

}  // namespace
}  // namespace sluice::memhandover
