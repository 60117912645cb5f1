/// What the threads of a job ask of the pool while its control thread is busy.

#include "memhandover/client/training_client.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "tests/memhandover/failing_allocations.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using memhandover::demand;
using memhandover::demand_answer;
using memhandover::lifetime;
using memhandover::training_client;
using std::chrono::steady_clock;

TEST(training_client_test, who_asks_is_answered_although_a_demand_waits_for_whoever_asks) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<bool> demanded{false};
  std::promise<void> answered;
  auto answer = answered.get_future();
  std::atomic<bool> in_time{false};
  std::vector<std::uint32_t> held;
  auto const job = training_client::join(world.broker(), "job", [&](demand const& /*what*/) {
    demanded = true;
    demanded.notify_all();
    in_time = answer.wait_for(20s) == std::future_status::ready;
    demand_answer given;
    given.chunks = held;
    return given;
  });
  auto const all = job->view().shape();
  job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + 20s);
  held = job->collect();
  ASSERT_EQ(held.size(), all.chunk_count);
  auto const server = world.join_server();
  std::jthread serving{
      [&] { EXPECT_NO_THROW((void)server->acquire(all.bytes() / 2, steady_clock::now() + 60s)); }};
  demanded.wait(false);

  job->ask(1, lifetime::revocable, steady_clock::now() + 60s);
  answered.set_value();
  serving.join();

  EXPECT_TRUE(in_time);
}

TEST(training_client_test, what_throws_on_the_control_thread_ends_nothing) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<int> demands{0};
  std::mutex one;
  std::vector<std::uint32_t> held;
  auto const job = training_client::join(world.broker(), "job", [&](demand const& /*what*/) {
    if (++demands == 1) {
      throw std::bad_alloc{};
    }
    demand_answer given;
    {
      std::lock_guard const lock{one};
      given.chunks = held;
    }
    given.afterwards = [](auto) { throw std::system_error{EAGAIN, std::generic_category()}; };
    return given;
  });
  auto const all = job->view().shape();
  auto const server = world.join_server();
  for (int turn = 0; turn < 2; ++turn) {
    job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + 20s);
    {
      std::lock_guard const lock{one};
      held = job->collect();
      ASSERT_EQ(held.size(), all.chunk_count);
    }
    EXPECT_THROW((void)server->acquire(all.bytes() / 2, steady_clock::now() + 20s), error);
    EXPECT_NO_THROW((void)server->acquire(all.bytes() / 2, steady_clock::now() + 20s));
    EXPECT_EQ(demands.exchange(0), 2);
  }
}

/// Nanoseconds that this process's control thread has computed for.
std::uint64_t control_thread_ran() {
  std::uint64_t ran = 0;  // while it has not named itself yet
  std::ifstream{"/proc/self/task/" + std::to_string(thread_named("sluice-control")) +
                "/schedstat"} >>
      ran;
  return ran;
}

TEST(training_client_test, the_control_thread_can_be_told_to_stay_awake_while_a_server_is_there) {
  fault_world world{"host"};
  world.start_broker();
  auto const job = training_client::join(world.broker(), "job",
                                         [](demand const& /*what*/) { return demand_answer{}; });
  auto const computes_for = [](std::chrono::nanoseconds so_long) {
    auto const before = control_thread_ran();
    auto const deadline = steady_clock::now() + 60s;
    while (control_thread_ran() - before < static_cast<std::uint64_t>(so_long.count())) {
      if (steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::yield();
    }
    return true;
  };
  auto const falls_asleep = [] {
    auto const deadline = steady_clock::now() + 60s;
    for (auto before = control_thread_ran(); steady_clock::now() < deadline;) {
      std::this_thread::sleep_for(100ms);  // is what is measured: nothing is computed in it
      if (auto const now = control_thread_ran(); now - std::exchange(before, now) < 1'000'000) {
        return true;
      }
    }
    return false;
  };

  job->stay_awake();
  EXPECT_TRUE(falls_asleep());
  auto server = world.join_server();
  job->watch([] {}, 10ms);  // else nobody tells it of the server
  EXPECT_TRUE(computes_for(100ms));
  EXPECT_GT(server->acquire(1, steady_clock::now() + 60s).bytes(), 0U);
  server.reset();
  EXPECT_TRUE(falls_asleep());
}

}  // namespace
}  // namespace sluice::test
