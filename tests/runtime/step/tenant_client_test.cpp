/// What the threads of a job ask of the pool while its control thread is busy.

#include "memhandover/client/tenant_client.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/client/membership.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/job_needs.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "tests/memhandover/failing_allocations.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using memhandover::client_kind;
using memhandover::demand;
using memhandover::demand_answer;
using memhandover::handover_report;
using memhandover::lifetime;
using memhandover::monotonic_ns;
using memhandover::tenant_client;
using std::chrono::steady_clock;

TEST(tenant_client_test, who_asks_is_answered_although_a_demand_waits_for_whoever_asks) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<bool> demanded{false};
  std::promise<void> answered;
  auto answer = answered.get_future();
  std::atomic<bool> in_time{false};
  std::vector<std::uint32_t> held;
  auto const job = tenant_client::join(
      world.broker(), client_kind::training, "job", [&](demand const& /*what*/) {
        demanded = true;
        demanded.notify_all();
        in_time = answer.wait_for(patience) == std::future_status::ready;
        demand_answer given;
        given.chunks = held;
        return given;
      });
  auto const all = job->view().shape();
  job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + patience);
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

TEST(tenant_client_test, who_wants_memory_of_a_job_that_leaves_has_it_when_that_has_ended) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<bool> demanded{false};
  auto job = tenant_client::join(world.broker(), client_kind::training, "job",
                                 [&](demand const& /*what*/) {
                                   demanded = true;
                                   return demand_answer{};
                                 });
  auto const all = job->view().shape();
  job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + patience);
  ASSERT_EQ(job->collect().size(), all.chunk_count);
  auto const server = world.join_server();
  job->leave();
  auto const& asked = job->view().controls()[job->slot()].demand;
  auto const before = asked.load();
  auto serving = std::async(std::launch::async, [&] {
    return server->acquire(all.bytes() / 2, steady_clock::now() + 60s).bytes();
  });
  while (asked.load() == before) {
    std::this_thread::yield();
  }
  EXPECT_EQ(serving.wait_for(100ms), std::future_status::timeout) << "it may not be refused";
  job.reset();
  EXPECT_EQ(serving.get(), all.bytes() / 2);
  EXPECT_FALSE(demanded);
}

TEST(tenant_client_test, what_was_given_back_is_counted_once_that_was_waited_for) {
  fault_world world{"host"};
  world.start_broker();
  auto const job = tenant_client::join(world.broker(), client_kind::training, "job",
                                       [](demand const& /*what*/) { return demand_answer{}; });
  auto const all = job->view().shape().chunk_count;
  for (int turn = 0; turn < 100; ++turn) {
    job->ask(all, lifetime::lasting, steady_clock::now() + patience);
    auto const held = job->collect();
    ASSERT_EQ(held.size(), all);
    ASSERT_EQ(job->view().header().grantable.load(), 0);

    job->release(held);
    job->await_releases(steady_clock::now() + patience);
    ASSERT_EQ(job->view().header().grantable.load(), all) << "turn " << turn;
  }
}

TEST(tenant_client_test, what_throws_on_the_control_thread_ends_nothing) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<int> demands{0};
  std::mutex one;
  std::vector<std::uint32_t> held;
  auto const job = tenant_client::join(
      world.broker(), client_kind::training, "job", [&](demand const& /*what*/) {
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
    job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + patience);
    {
      std::lock_guard const lock{one};
      held = job->collect();
      ASSERT_EQ(held.size(), all.chunk_count);
    }
    EXPECT_THROW((void)server->acquire(all.bytes() / 2, steady_clock::now() + patience), error);
    EXPECT_NO_THROW((void)server->acquire(all.bytes() / 2, steady_clock::now() + patience));
    EXPECT_EQ(demands.exchange(0), 2);
  }
}

/// A tenant that gives what is demanded of it, as far as it has it, and all of it out of use. `unit`: how long its device
/// goes on for first; nothing: that is not known.
class giving_tenant {
 public:
  giving_tenant(fault_world const& world, client_kind kind, std::uint32_t count,
                std::optional<std::chrono::nanoseconds> unit = std::nullopt,
                memhandover::job_wish const& wish = {})
      : unit_{unit} {
    std::lock_guard const lock{mutex_};
    client_ = tenant_client::join(
        world.broker(), kind, memhandover::traits_of(kind).name,
        [this](demand const& what) { return give(what); }, wish);
    client_->ask(count, lifetime::lasting, steady_clock::now() + patience);
    held_ = client_->collect();
    EXPECT_EQ(held_.size(), count);
  }
  [[nodiscard]] std::vector<std::uint32_t> demanded() {
    std::lock_guard const lock{mutex_};
    return std::exchange(demanded_, {});
  }
  /// Of the demands since this was asked last.
  [[nodiscard]] std::vector<bool> might_park() {
    std::lock_guard const lock{mutex_};
    return std::exchange(may_park_, {});
  }
  [[nodiscard]] tenant_client& client() { return *client_; }

 private:
  demand_answer give(demand const& what) {
    std::lock_guard const lock{mutex_};
    auto const wanted = what.chunks;
    demanded_.push_back(wanted);
    may_park_.push_back(what.may_park);
    demand_answer given;
    given.noticed_ns = monotonic_ns();
    do {
      given.closed_ns = given.idle_ns = monotonic_ns();
    } while (given.idle_ns - given.noticed_ns < unit_.value_or(0ns).count());
    given.unit_ended_ns = unit_ ? given.idle_ns : 0;
    for (; given.chunks.size() < wanted && !held_.empty(); held_.pop_back()) {
      given.chunks.push_back(held_.back());
      ++given.live_chunks;
    }
    return given;
  }

  std::optional<std::chrono::nanoseconds> unit_;
  std::mutex mutex_;  ///< guards what follows
  std::vector<std::uint32_t> held_;
  std::vector<std::uint32_t> demanded_;
  std::vector<bool> may_park_;
  std::unique_ptr<tenant_client> client_;
};

using demands = std::vector<std::uint32_t>;

TEST(tenant_client_test, training_is_asked_first_and_engines_for_the_rest_the_larger_one_before) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 8};
  giving_tenant small{world, client_kind::engine, 6};
  giving_tenant large{world, client_kind::engine, 10};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  auto const chunk = server->shape().chunk_bytes;
  ASSERT_EQ(server->shape().chunk_count, 24U);
  auto const some = server->acquire(5 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{5});
  EXPECT_EQ(large.demanded(), demands{});
  auto const more = server->acquire(11 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{11});
  EXPECT_EQ(large.demanded(), demands{8});
  EXPECT_EQ(small.demanded(), demands{});
  EXPECT_EQ(server->usage().training_bytes, 0U);
  EXPECT_EQ(server->usage().engine_bytes, 8 * chunk);
  EXPECT_EQ(server->usage().serving_bytes, 16 * chunk);
  EXPECT_EQ(server->usage().kept_bytes, 0U);
}

TEST(tenant_client_test, nobody_is_asked_for_what_only_an_engine_could_give_that_is_not_asked) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 8};
  giving_tenant engine{world, client_kind::engine, 10};
  auto const server = world.join_server();
  auto const chunk = server->shape().chunk_bytes;
  EXPECT_EQ(server->usage().kept_bytes, 10 * chunk);
  EXPECT_THROW((void)server->acquire(15 * chunk, steady_clock::now() + patience), error);
  EXPECT_EQ(job.demanded(), demands{});
  EXPECT_EQ(engine.demanded(), demands{});
  EXPECT_EQ(server->acquire(14 * chunk, steady_clock::now() + patience).bytes(), 14 * chunk);
  EXPECT_EQ(job.demanded(), demands{8});
  EXPECT_EQ(engine.demanded(), demands{});
}

TEST(tenant_client_test, of_several_each_counts_for_what_it_has_given_and_for_its_own_time) {
  fault_world world{"host"};
  world.start_broker();
  constexpr auto unit = 20ms;
  giving_tenant first{world, client_kind::training, 10, unit};
  giving_tenant second{world, client_kind::training, 8};
  auto const server = world.join_server();
  auto const chunk = server->shape().chunk_bytes;
  handover_report report;
  auto const most = server->acquire(20 * chunk, steady_clock::now() + patience, &report);
  EXPECT_EQ(first.demanded(), demands{10});
  EXPECT_EQ(second.demanded(), demands{4});
  EXPECT_EQ(report.bytes_reclaimed, 14 * chunk);
  EXPECT_EQ(report.bytes_live, 14 * chunk);
  EXPECT_LE(report.notify + report.gate + report.drain + report.revoke + report.ledger,
            report.total);
  EXPECT_GE(report.unit, unit) << "the first one's is lost";
}

TEST(tenant_client_test, what_is_given_for_the_reserve_is_not_part_of_what_was_acquired) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 20};
  auto const server = world.join_server();
  auto const chunk = server->shape().chunk_bytes;
  server->set_reserve(4 * chunk);
  handover_report report;
  auto const some = server->acquire(7 * chunk, steady_clock::now() + patience, &report);
  EXPECT_EQ(job.demanded(), demands{7});
  EXPECT_EQ(report.bytes_reclaimed, 3 * chunk);
  EXPECT_EQ(report.bytes_live, 3 * chunk);
  EXPECT_EQ(server->usage().free_bytes, 4 * chunk);
}

TEST(tenant_client_test, engines_give_nothing_for_the_reserve) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 8};
  giving_tenant engine{world, client_kind::engine, 10};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  auto const chunk = server->shape().chunk_bytes;
  server->set_reserve(2 * chunk);
  auto const some = server->acquire(10 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{6});
  auto const more = server->acquire(8 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{8});
  EXPECT_EQ(engine.demanded(), demands{4});
  EXPECT_EQ(server->usage().engine_bytes, 6 * chunk);
  EXPECT_EQ(server->usage().free_bytes, 0U);
}

/// As if it waited for so many, which are owed to it from now on.
void lack(giving_tenant& who, std::atomic<std::uint32_t> memhandover::client_report::*what,
          std::uint32_t chunks) {
  auto& mailbox = who.client().mailbox();
  (mailbox.*what).store(chunks);
  mailbox.looked_ns.store(monotonic_ns());
  mailbox.owed_ns.store(monotonic_ns());
}

TEST(tenant_client_test,
     what_an_engine_is_short_of_is_demanded_from_jobs_then_engines_and_kept_for_it) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 8};
  giving_tenant other{world, client_kind::engine, 10};
  giving_tenant engine{world, client_kind::engine, 6};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  server->gather_owed(steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{}) << "nothing is owed";
  lack(engine, &memhandover::client_report::short_chunks, 9);
  server->gather_owed(steady_clock::now() + patience);
  EXPECT_EQ(job.demanded(), demands{9});
  EXPECT_EQ(other.demanded(), demands{1});
  EXPECT_EQ(engine.demanded(), demands{});
  lack(engine, &memhandover::client_report::short_chunks, 9);  // it looks again and again
  EXPECT_EQ(server->usage().free_bytes, 0U) << "what is free is owed";
  job.client().ask(9, lifetime::lasting, steady_clock::now() + patience);
  EXPECT_EQ(job.client().collect().size(), 0U);
  engine.client().ask(9, lifetime::lasting, steady_clock::now() + patience);
  EXPECT_EQ(engine.client().collect().size(), 9U);
}

TEST(tenant_client_test, what_a_job_is_owed_is_demanded_from_engines_alone) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 8};
  giving_tenant neighbour{world, client_kind::training, 6};
  giving_tenant engine{world, client_kind::engine, 10};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  lack(job, &memhandover::client_report::parked_chunks, 12);
  server->gather_owed(steady_clock::now() + patience);
  EXPECT_EQ(engine.demanded(), demands{12});
  EXPECT_EQ(neighbour.demanded(), demands{});
  EXPECT_EQ(job.demanded(), demands{});
}

memhandover::job_wish wish_for(memhandover::priority rank, std::uint32_t percent = 0) {
  return {rank, 0, percent * 10'000};
}

TEST(tenant_client_test, jobs_of_lower_priority_give_first_whoever_has_most) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant high{world, client_kind::training, 12, std::nullopt, wish_for(priority::high)};
  giving_tenant usual{world, client_kind::training, 7};
  giving_tenant low{world, client_kind::training, 5, std::nullopt, wish_for(priority::low)};
  auto const server = world.join_server();
  auto const chunk = server->shape().chunk_bytes;
  auto const some = server->acquire(4 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(low.demanded(), demands{4});
  auto const more = server->acquire(6 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(low.demanded(), demands{6});
  EXPECT_EQ(usual.demanded(), demands{5});
  EXPECT_EQ(high.demanded(), demands{});
  auto const rest = server->acquire(8 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(usual.demanded(), demands{8});
  EXPECT_EQ(high.demanded(), demands{6});
}

TEST(tenant_client_test, a_job_of_low_priority_is_parked_before_another_one_gives_anything) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant low{world, client_kind::training, 10, std::nullopt, wish_for(priority::low)};
  giving_tenant one{world, client_kind::training, 8};
  giving_tenant other{world, client_kind::training, 6};
  auto const keeps = [](giving_tenant& of, std::uint32_t kept, std::uint32_t parkable) {
    of.client().mailbox().parkable_chunks.store(parkable);
    of.client().mailbox().kept_chunks.store(kept);
  };
  keeps(low, 8, 6);
  keeps(one, 4, 4);
  keeps(other, 3, 3);
  auto const server =
      memhandover::serving_pool::join({.runtime_dir = world.folder(), .park_stay = 1});
  auto const chunk = server->shape().chunk_bytes;
  EXPECT_EQ(server->usage().kept_bytes, 2 * chunk);
  auto const some = server->acquire(8 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(low.demanded(), demands{8});
  EXPECT_EQ(low.might_park(), std::vector{true});
  keeps(low, 2, 0);
  // Of equals nobody is parked as long as what they use for their micro-batches will do.
  auto const more = server->acquire(6 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(one.demanded(), demands{4});
  EXPECT_EQ(other.demanded(), demands{2});
  EXPECT_EQ(one.might_park(), std::vector{false});
  EXPECT_EQ(other.might_park(), std::vector{false});
  EXPECT_EQ(low.demanded(), demands{});
}

TEST(tenant_client_test, a_minimum_is_left_to_a_job_and_another_of_higher_priority_gives_instead) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant low{world, client_kind::training, 14, std::nullopt,
                    wish_for(priority::low, 50)};  // of 24 chunks
  giving_tenant high{world, client_kind::training, 10, std::nullopt, wish_for(priority::high)};
  auto const server = world.join_server();
  auto const chunk = server->shape().chunk_bytes;
  EXPECT_EQ(server->usage().kept_bytes, 12 * chunk);
  server->set_reserve(2 * chunk);
  auto const some = server->acquire(2 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(low.demanded(), demands{2}) << "not for the reserve either";
  server->set_reserve(0);
  auto const more = server->acquire(9 * chunk, steady_clock::now() + patience);
  EXPECT_EQ(low.demanded(), demands{});
  EXPECT_EQ(high.demanded(), demands{9});
  try {
    auto const never = server->acquire(4 * chunk, steady_clock::now() + patience);
    FAIL();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::out_of_memory);
    EXPECT_THAT(why.what(), testing::AllOf(testing::HasSubstr("at most 64 KiB"),
                                           testing::HasSubstr("has a minimum of 768 KiB")));
  }
  EXPECT_EQ(low.demanded(), demands{});
  EXPECT_EQ(high.demanded(), demands{}) << "nothing is taken in vain";
}

TEST(tenant_client_test, a_demand_that_was_written_for_more_leaves_the_minimum_all_the_same) {
  fault_world world{"host"};
  world.start_broker();
  giving_tenant job{world, client_kind::training, 20, std::nullopt,
                    wish_for(memhandover::priority::normal, 50)};  // of 24 chunks
  memhandover::membership const server{world.broker(), client_kind::server, "server", ""};
  memhandover::ledger_writer writer{server.view()};
  auto const slot = job.client().slot();
  for (auto const& given : {demands{8}, demands{}}) {
    auto const number = writer.demand(slot, 20);
    job.client().nudge();
    auto const deadline = steady_clock::now() + patience;
    while (job.client().mailbox().demand_done.load() != number) {
      ASSERT_LT(steady_clock::now(), deadline);
      std::this_thread::yield();
    }
    EXPECT_EQ(job.demanded(), given);
  }
}

/// What the job with that client still needs, over and over, as one that waits for it says it.
void needs(giving_tenant& job, std::uint32_t chunks) {
  memhandover::show_need(job.client().mailbox(), chunks, 1h);
}

TEST(tenant_client_test, what_a_job_needs_is_demanded_from_jobs_of_lower_priority_alone) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant high{world, client_kind::training, 2, std::nullopt, wish_for(priority::high)};
  giving_tenant equal{world, client_kind::training, 6, std::nullopt, wish_for(priority::high)};
  giving_tenant usual{world, client_kind::training, 7};
  giving_tenant low{world, client_kind::training, 5, std::nullopt, wish_for(priority::low)};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  ASSERT_EQ(server->shape().chunk_count, 24U);
  EXPECT_FALSE(server->is_needed());
  needs(high, 4);  // that are free
  EXPECT_FALSE(server->is_needed());
  needs(high, 11);
  EXPECT_TRUE(server->is_needed());
  EXPECT_TRUE(server->gather_needed(steady_clock::now() + patience));
  EXPECT_EQ(low.demanded(), demands{7});
  EXPECT_EQ(usual.demanded(), demands{2});
  EXPECT_EQ(equal.demanded(), demands{});
  EXPECT_FALSE(server->is_needed());
  for (auto* const other : {&low, &usual}) {
    other->client().ask(5, lifetime::lasting, steady_clock::now() + patience);
    EXPECT_TRUE(other->client().collect().empty()) << "it is kept for who needs it";
  }
  high.client().ask(11, lifetime::lasting, steady_clock::now() + patience);
  EXPECT_EQ(high.client().collect().size(), 11U);
  memhandover::withdraw_need(high.client().mailbox());
}

TEST(tenant_client_test, nobody_gives_for_a_job_what_would_not_do_or_would_have_to_be_parked) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant high{world, client_kind::training, 10, std::nullopt, wish_for(priority::high)};
  giving_tenant low{world, client_kind::training, 14, std::nullopt, wish_for(priority::low, 25)};
  auto const server = memhandover::serving_pool::join(
      {.runtime_dir = world.folder(), .demands_from_engines = true});
  needs(high, 9);  // more than is above the minimum
  EXPECT_FALSE(server->is_needed());
  EXPECT_FALSE(server->gather_needed(steady_clock::now() + patience));
  low.client().mailbox().parkable_chunks.store(10);
  low.client().mailbox().kept_chunks.store(10);
  needs(high, 5);
  EXPECT_FALSE(server->gather_needed(steady_clock::now() + patience));
  EXPECT_EQ(low.demanded(), demands{});
  needs(high, 4);
  EXPECT_TRUE(server->gather_needed(steady_clock::now() + patience));
  EXPECT_EQ(low.demanded(), demands{4});
  EXPECT_EQ(low.might_park(), std::vector<bool>{false});
}

TEST(tenant_client_test, minimums_that_are_more_than_the_pool_are_refused_as_a_job_joins) {
  using memhandover::priority;
  fault_world world{"host"};
  world.start_broker();
  giving_tenant first{world, client_kind::training, 1, std::nullopt,
                      wish_for(priority::normal, 70)};
  auto const join = [&](std::uint32_t percent) {
    return tenant_client::join(
        world.broker(), client_kind::training, "second",
        [](demand const& /*what*/) { return demand_answer{}; }, wish_for(priority::high, percent));
  };
  try {
    (void)join(40);
    FAIL();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::out_of_memory);
    EXPECT_THAT(why.what(), testing::HasSubstr("to training (pid"));
  }
  EXPECT_NO_THROW((void)join(29));
}

/// Nanoseconds that this process's control thread has computed for.
std::uint64_t control_thread_ran() {
  std::uint64_t ran = 0;  // while it has not named itself yet
  std::ifstream{"/proc/self/task/" + std::to_string(thread_named("sluice-control")) +
                "/schedstat"} >>
      ran;
  return ran;
}

TEST(tenant_client_test, the_control_thread_can_be_told_to_stay_awake_while_a_server_is_there) {
  fault_world world{"host"};
  world.start_broker();
  auto const job = tenant_client::join(world.broker(), client_kind::training, "job",
                                       [](demand const& /*what*/) { return demand_answer{}; });
  auto const computes_for = [](std::chrono::nanoseconds so_long) {
    auto const before = control_thread_ran();
    auto const deadline = steady_clock::now() + patience;
    while (control_thread_ran() - before < static_cast<std::uint64_t>(so_long.count())) {
      if (steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::yield();
    }
    return true;
  };
  auto const falls_asleep = [] {
    auto const deadline = steady_clock::now() + patience;
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
