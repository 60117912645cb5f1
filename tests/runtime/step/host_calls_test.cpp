/// Which operators of a program on the host the gate counts, through the C boundary: what torch calls is called here.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/process_state.hpp"

namespace sluice::step {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr std::int64_t ever = std::numeric_limits<std::int64_t>::max();
constexpr std::uint64_t pool_bytes = 64_MiB;

std::int64_t in(std::chrono::nanoseconds time) {
  return memhandover::monotonic_ns() + time.count();
}

std::string const& folder() {
  static std::string const where = environment("SLUICE_RUNTIME_DIR");
  return where;
}

/// This process shares once, for all tests, and its control thread outlives them.
class host_calls_test : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(sluice_join_host(), SLUICE_OK) << sluice_last_error(); }

  [[nodiscard]] static operator_gate& gate() { return sharing()->memory->operators(); }
};

TEST_F(host_calls_test, joining_again_changes_nothing) {
  auto const* const before = sharing();
  EXPECT_EQ(sluice_join_host(), SLUICE_OK);
  EXPECT_EQ(sharing(), before);
}

TEST_F(host_calls_test, every_outermost_operator_is_waited_for_by_what_closes_the_gate_to_all) {
  sluice_host_operator_begin();
  sluice_host_operator_begin();
  ASSERT_TRUE(gate().close_all(ever));
  sluice_host_operator_end();
  EXPECT_FALSE(gate().wait_idle(in(1ms))) << "it is still in the outermost";
  sluice_host_operator_end();
  EXPECT_TRUE(gate().wait_idle(in(60s)));

  std::atomic<bool> begun{false};
  std::jthread held{[&begun] {
    sluice_host_operator_begin();
    begun = true;
    sluice_host_operator_end();
  }};
  for (auto const until = steady_clock::now() + 50ms; steady_clock::now() < until;) {
    EXPECT_FALSE(begun);
  }
  gate().open();
  held.join();
  EXPECT_TRUE(begun);
}

TEST_F(host_calls_test, what_only_calls_operators_is_waited_for_within_those_alone) {
  sluice_host_operator_begin();
  sluice_host_caller_begin();
  ASSERT_TRUE(gate().close_all(ever));
  EXPECT_TRUE(gate().wait_idle(in(60s)));
  gate().open();
  sluice_host_operator_begin();
  ASSERT_TRUE(gate().close_all(ever));
  EXPECT_FALSE(gate().wait_idle(in(1ms)));
  sluice_host_operator_end();
  EXPECT_TRUE(gate().wait_idle(in(60s)));
  gate().open();
  sluice_host_caller_end();
  ASSERT_TRUE(gate().close_all(ever));
  EXPECT_FALSE(gate().wait_idle(in(1ms))) << "it is back in the first";
  sluice_host_operator_end();
  EXPECT_TRUE(gate().wait_idle(in(60s)));
  gate().open();
}

TEST_F(host_calls_test, demands_for_the_arena_wait_for_what_is_in_it_alone) {
  sluice_host_operator_begin();
  ASSERT_TRUE(gate().close(ever));
  EXPECT_TRUE(gate().wait_idle(in(60s)));
  gate().open();
  sluice_host_operator_end();

  sluice_enter(1);
  sluice_host_operator_begin();
  ASSERT_TRUE(gate().close(ever));
  EXPECT_FALSE(gate().wait_idle(in(1ms)));
  sluice_enter(0);
  sluice_host_operator_end();
  EXPECT_TRUE(gate().wait_idle(in(60s))) << "it ends as what it has begun as";
  gate().open();
}

TEST_F(host_calls_test, an_operator_that_waits_for_the_pool_is_not_waited_for_and_held_afterwards) {
  auto const server = memhandover::serving_pool::join({.runtime_dir = folder()});
  auto taken = std::make_unique<memhandover::placement>(
      server->acquire(pool_bytes / 2, steady_clock::now() + 30s));

  std::atomic<bool> waits{false};
  std::atomic<bool> has{false};
  std::jthread computing{[&] {
    sluice_host_operator_begin();
    waits = true;
    void* address = nullptr;
    EXPECT_EQ(sluice_host_alloc(&address, pool_bytes * 3 / 4), SLUICE_OK) << sluice_last_error();
    has = true;
    sluice_host_operator_end();
    EXPECT_EQ(sluice_host_free(address), 1);
  }};
  auto const& box = sharing()->memory->client().mailbox();
  while (!waits || box.waiting.load() == 0) {
    std::this_thread::yield();
  }
  ASSERT_TRUE(gate().close_all(ever));
  EXPECT_TRUE(gate().wait_idle(in(30s)));
  taken.reset();
  while (sharing()->memory->kept_bytes() < pool_bytes / 2) {  // it has been given its memory
    std::this_thread::yield();
  }
  EXPECT_FALSE(has);
  gate().open();
  computing.join();
  EXPECT_TRUE(has);
}

}  // namespace
}  // namespace sluice::step

/// The tests run in a child: what it has joined is taken away when it has ended.
int main(int argc, char** argv) {
  using namespace sluice;
  testing::InitGoogleTest(&argc, argv);
  auto pattern = (std::filesystem::temp_directory_path() / "sluice-calls-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    return 1;
  }
  ::setenv("SLUICE_RUNTIME_DIR", pattern.c_str(), 1);
  ::setenv("SLUICE_BROKER", SLUICE_PROGRAM, 1);
  ::setenv("SLUICE_POOL_BYTES", std::to_string(step::pool_bytes).c_str(), 1);
  auto const child = ::fork();
  if (child == 0) {
    return RUN_ALL_TESTS();
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  if (auto const broker = memhandover::broker_pid(pattern); broker > 0) {
    ::kill(broker, SIGKILL);
    while (memhandover::broker_pid(pattern) == broker) {
      std::this_thread::yield();
    }
  }
  std::filesystem::remove_all(pattern);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
