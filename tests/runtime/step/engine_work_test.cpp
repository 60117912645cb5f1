/// The server is told when the device works for engines of its pool, and when it has done all, whoever says so, or does not any more.
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/client/serving_pool.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/client/work_report.hpp"
#include "runtime/step/operator_watch.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using memhandover::client_kind;
using memhandover::monotonic_ns;
using memhandover::tenant_client;
using memhandover::work_report;

class work_of_engines : public testing::Test {
 protected:
  struct told {
    bool works = false;
    bool waited = false;
    bool operator==(told const&) const = default;
  };

  work_of_engines() {
    world_.start_broker();
    server_ = world_.join_server();
    server_->watch_engines([this](bool works, bool waited) {
      std::lock_guard const lock{mutex_};
      if (auto const meanwhile = std::exchange(meanwhile_, {})) {
        meanwhile();
      }
      heard_.push_back({works, works ? false : waited});
      came_.notify_all();
    });
  }
  work_of_engines(work_of_engines const&) = delete;
  work_of_engines& operator=(work_of_engines const&) = delete;
  ~work_of_engines() override { server_->watch_engines({}); }

  [[nodiscard]] std::unique_ptr<tenant_client> join(client_kind kind = client_kind::engine) {
    return tenant_client::join(world_.broker(), kind, "tenant", [](memhandover::demand const&) {
      return memhandover::demand_answer{};
    });
  }
  [[nodiscard]] static work_report report_of(tenant_client const& client) {
    return {client.mailbox(), client.files().doorbell.get()};
  }
  [[nodiscard]] std::vector<told> hear(std::size_t count) {
    std::unique_lock lock{mutex_};
    EXPECT_TRUE(came_.wait_for(lock, patience, [&] { return heard_.size() >= count; }));
    return heard_;
  }

  fault_world world_{"host"};
  std::shared_ptr<memhandover::serving_pool> server_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::vector<told> heard_;
  std::function<void()> meanwhile_;  ///< done by who hears it next, before anything is said
};

TEST_F(work_of_engines, is_heard_from_its_begin_to_its_end) {
  auto const engine = join();
  auto report = report_of(*engine);
  report.begins();
  EXPECT_EQ(hear(1), (std::vector<told>{{true, false}}));
  report.drained(true);
  EXPECT_EQ(hear(2).back(), (told{false, true}));
  EXPECT_GT(engine->mailbox().worked_ns.load(), 0U);
  report.begins();
  EXPECT_EQ(hear(3).back(), (told{true, false}));
  report.drained(false);
  EXPECT_EQ(hear(4).back(), (told{false, false}));
}

TEST_F(work_of_engines, is_heard_though_it_begins_while_the_end_of_the_last_is_seen) {
  auto const engine = join();
  auto report = report_of(*engine);
  report.begins();
  EXPECT_EQ(hear(1).size(), 1U);
  {
    std::lock_guard const lock{mutex_};
    meanwhile_ = [&report] { report.begins(); };
  }
  report.drained(true);
  EXPECT_EQ(hear(3), (std::vector<told>{{true, false}, {false, true}, {true, false}}));
}

TEST_F(work_of_engines, lasts_as_long_as_that_of_any) {
  auto const one = join();
  auto const other = join();
  auto first = report_of(*one);
  auto second = report_of(*other);
  first.begins();
  EXPECT_EQ(hear(1).size(), 1U);
  second.begins();
  first.drained(true);
  second.drained(false);
  EXPECT_EQ(hear(2), (std::vector<told>{{true, false}, {false, false}}));
}

TEST_F(work_of_engines, ends_with_who_says_nothing_any_more) {
  auto const engine = join();
  auto& says = engine->mailbox();
  auto report = report_of(*engine);
  report.begins();
  EXPECT_EQ(hear(1).size(), 1U);
  says.works_until_ns.store(monotonic_ns() + 1'000'000);
  (void)::eventfd_write(engine->files().doorbell.get(), 1);
  EXPECT_EQ(hear(2).size(), 2U) << "nobody has rung";
  report.begins();
  EXPECT_EQ(hear(3).size(), 3U);
  says.works_until_ns.store(monotonic_ns() + 1'000'000);
  auto const before_ns = monotonic_ns();
  report.renew();
  EXPECT_GT(says.works_until_ns.load(), before_ns + 500'000'000);
  report.drained(false);
  EXPECT_EQ(hear(4).size(), 4U);
  report.renew();
  EXPECT_EQ(says.works_until_ns.load(), 0) << "it rests";
}

TEST_F(work_of_engines, is_that_of_live_engines_alone_and_for_a_while_whatever_is_said) {
  auto const job = join(client_kind::training);
  auto engine = join();
  auto const now = monotonic_ns();
  constexpr auto for_ever = std::numeric_limits<std::int64_t>::max();
  job->mailbox().works_until_ns.store(for_ever);
  auto const& view = job->view();
  EXPECT_FALSE(memhandover::work_of_engines(view, now).works);
  engine->mailbox().works_until_ns.store(for_ever);
  auto const seen = memhandover::work_of_engines(view, now);
  EXPECT_TRUE(seen.works);
  EXPECT_EQ(seen.until_ns, now + std::chrono::nanoseconds{work_report::lasts}.count());
  engine->mailbox().works_until_ns.store(-1);
  EXPECT_FALSE(memhandover::work_of_engines(view, now).works);
  report_of(*engine).begins();
  EXPECT_EQ(hear(1).size(), 1U);
  engine.reset();
  EXPECT_EQ(hear(2).size(), 2U) << "it has left";
}

/// What is watched is never destroyed.
struct watched {
  memhandover::client_report says{};
  int bell = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  work_report report{says, bell};
  step::operator_gate operators;
  step::operator_watch* watch = new step::operator_watch{report, operators};

  [[nodiscard]] bool works() const { return says.works_until_ns.load() != 0; }
};

TEST(operator_watch, an_engine_works_while_operators_run_and_rests_afterwards) {
  static auto& its = *new watched;
  auto const compute = [&](int operators) {
    for (int i = 0; i < operators; ++i) {
      its.operators.operator_begin();
      its.watch->operator_begins();
      EXPECT_TRUE(its.works());
      its.operators.operator_end();
    }
  };
  for (int round = 0; round < 20; ++round) {
    compute(3);
    while (its.works()) {
      std::this_thread::yield();
    }
  }
  its.operators.operator_begin();
  its.watch->operator_begins();
  auto const end = std::chrono::steady_clock::now() + 20ms;
  while (std::chrono::steady_clock::now() < end) {
    ASSERT_TRUE(its.works()) << "one runs for longer than it is looked for";
  }
  its.operators.operator_end();
  while (its.works()) {
    std::this_thread::yield();
  }
  EXPECT_GT(its.says.worked_ns.load(), 20'000'000U);
}

TEST(operator_watch, whenever_an_operator_runs_it_is_said_so) {
  static auto& its = *new watched;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([i] {
      for (int round = 0; round < 200; ++round) {
        auto const uses =
            round % 2 == 0 ? step::operator_memory::arena : step::operator_memory::lasting;
        its.operators.operator_begin(uses);
        its.watch->operator_begins();
        EXPECT_TRUE(its.works());
        std::this_thread::yield();
        EXPECT_TRUE(its.works());
        its.operators.operator_end(uses);
        std::this_thread::sleep_for(std::chrono::microseconds{500 * ((round + i) % 7)});
      }
    });
  }
}

}  // namespace
}  // namespace sluice::test
