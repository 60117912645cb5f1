/// Host copies with real processes that are killed: whose they are, and that the next broker has them.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;

class host_copies_process_test : public pool_process_test {
 protected:
  static constexpr std::uint64_t budget = 17_MiB;  // eight slots, and a part of one
  static constexpr std::uint64_t all = 16_MiB;

  void SetUp() override {
    pool_process_test::SetUp();
    (void)::setenv("LD_LIBRARY_PATH", SLUICE_FAKE_DRIVER_FOLDER, 1);
  }
  void TearDown() override {
    broker_.reset();
    (void)::unsetenv("LD_LIBRARY_PATH");
    pool_process_test::TearDown();
  }

  [[nodiscard]] memhandover::broker_options wish(std::uint64_t host_copy_bytes) const {
    memhandover::broker_options wanted;
    wanted.runtime_dir = folder_;
    wanted.backend = "cuda";
    wanted.pool_bytes = pool_bytes;
    wanted.chunk_bytes = 2_MiB;
    wanted.host_copy_bytes = host_copy_bytes;
    return wanted;
  }
  void start_broker(std::uint64_t host_copy_bytes = budget) {
    broker_ = memhandover::ensure_broker(wish(host_copy_bytes));
  }
  child parker(int slots) {
    child started{"parker", {folder_, std::to_string(slots)}};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }
  static void expect_intact(child& holder) {
    ASSERT_EQ(::kill(holder.pid(), SIGUSR1), 0);
    auto said = holder.line();
    while (!said.empty() && said.front() == '[') {
      said = holder.line();  // a log line
    }
    EXPECT_EQ(said, "intact");
  }
  [[nodiscard]] nlohmann::json copies() const { return status()["pool"]["host_copies"]; }
  [[nodiscard]] std::uint64_t free_bytes() const { return copies()["free_bytes"]; }

  memhandover::unique_fd broker_;  ///< keeps it
};

TEST_F(host_copies_process_test, status_says_their_bytes_and_the_pages_come_by_themselves) {
  start_broker();
  EXPECT_EQ(copies()["bytes"], all);
  EXPECT_EQ(copies()["free_bytes"], all);
  await([&] { return copies()["populated_bytes"] == all; }, "the pages of the host copies");
  auto holder = parker(3);
  EXPECT_EQ(free_bytes(), all - 6_MiB);
  expect_intact(holder);
  EXPECT_EQ(holder.stop(), 0);
  EXPECT_EQ(free_bytes(), all);
}

TEST_F(host_copies_process_test, without_a_budget_there_are_none) {
  start_broker(0);
  EXPECT_TRUE(copies().is_null());
  child job{"parker", {folder_, "1"}};
  EXPECT_EQ(job.line(), "none");
}

TEST_F(host_copies_process_test, a_budget_smaller_than_a_chunk_is_refused_with_the_numbers) {
  try {
    start_broker(1_MiB);
    ADD_FAILURE() << "it was not refused";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument);
    EXPECT_NE(std::string{why.what()}.find("1 MiB, but one takes 2 MiB"), std::string::npos)
        << why.what();
  }
}

TEST_F(host_copies_process_test, what_a_killed_client_held_is_free_and_no_others) {
  start_broker();
  auto survivor = parker(2);
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto victim = parker(6);
    EXPECT_EQ(free_bytes(), 0U);
    victim.kill();
    await([&] { return free_bytes() == all - 4_MiB; }, "the dead client's copies to be free");
    expect_intact(survivor);
  }
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, the_next_broker_adopts_table_and_bytes) {
  start_broker();
  auto survivor = parker(3);
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto victim = parker(4);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    broker_.reset();
    victim.kill();  // while there is nobody to see it
    await_another_broker(broker);
    await([&] { return status()["clients"].size() == 1; }, "the dead client to be taken back");
    EXPECT_EQ(copies()["bytes"], all);
    EXPECT_EQ(free_bytes(), all - 6_MiB);
    expect_intact(survivor);
  }
  auto newcomer = parker(5);
  EXPECT_EQ(free_bytes(), 0U);
  expect_intact(newcomer);
  EXPECT_EQ(newcomer.stop(), 0);
  EXPECT_EQ(survivor.stop(), 0);
}

}  // namespace
}  // namespace sluice::test
