#include "runtime/step/run_ahead_choice.hpp"

#include <gtest/gtest.h>

namespace sluice::step {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;

/// The header of a pool in which a server is attached.
class a_pool : public testing::Test {
 protected:
  a_pool() { header_.serving_now.store(1); }

  void publish(nanoseconds bound) {
    header_.run_ahead_ns.store(static_cast<std::uint64_t>(bound.count()));
  }

  memhandover::ledger_header header_{};
};

TEST_F(a_pool, the_bound_is_the_servers) {
  publish(70us);
  EXPECT_EQ(choose_run_ahead(header_, std::nullopt), 70us);
}

TEST_F(a_pool, what_the_job_says_of_itself_comes_first) {
  publish(70us);
  EXPECT_EQ(choose_run_ahead(header_, 450us), 450us);
}

TEST_F(a_pool, a_server_that_says_nothing_has_the_default) {
  EXPECT_EQ(choose_run_ahead(header_, std::nullopt), default_run_ahead);
}

TEST_F(a_pool, without_a_server_nothing_is_bounded) {
  publish(70us);
  header_.serving_now.store(0);
  EXPECT_EQ(choose_run_ahead(header_, std::nullopt), 0ns);
  EXPECT_EQ(choose_run_ahead(header_, 450us), 0ns);
}

TEST_F(a_pool, a_damaged_bound_is_not_followed) {
  for (auto const damage : {1'000'000'001ULL, ~0ULL, 1ULL << 63U}) {
    header_.run_ahead_ns.store(damage);
    EXPECT_EQ(choose_run_ahead(header_, std::nullopt), default_run_ahead);
  }
  publish(1s);
  EXPECT_EQ(choose_run_ahead(header_, std::nullopt), 1s);
}

TEST(run_ahead_of_job, is_a_number_of_microseconds) {
  EXPECT_EQ(run_ahead_of_job("1"), 1us);
  EXPECT_EQ(run_ahead_of_job("1000000"), 1s);
  EXPECT_EQ(run_ahead_of_job(""), std::nullopt);
}

TEST(run_ahead_of_job, is_ignored_when_it_is_none) {
  for (char const* wrong :
       {"0", "-5", "1000001", "99999999999999999999", "200us", "2e2", " 200", "x"}) {
    EXPECT_EQ(run_ahead_of_job(wrong), std::nullopt) << wrong;
  }
}

}  // namespace
}  // namespace sluice::step
