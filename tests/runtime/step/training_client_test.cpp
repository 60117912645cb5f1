/// What the threads of a job ask of the pool while its control thread is busy.

#include "memhandover/training_client.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "memhandover/serving_pool.hpp"
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

}  // namespace
}  // namespace sluice::test
