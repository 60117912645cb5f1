/// The pool with real processes that are killed at random instants.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <future>
#include <optional>
#include <set>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/pool_search.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "tests/from_environment.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;

TEST_F(pool_process_test, training_alone_lives_in_the_pool) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  auto const now = status();
  EXPECT_EQ(now["pool"]["writer"], "broker");
  EXPECT_GE(now["pool"]["training_bytes"].get<std::uint64_t>(), 40_MiB);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, training_says_what_each_of_its_chunks_holds) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  std::set<std::string> held;
  // A chunk that has just been granted holds nothing yet.
  await(
      [&] {
        held.clear();
        std::uint32_t next = 0;
        auto const shown = memhandover::query_chunks(folder_);
        for (auto const& run : shown["runs"]) {
          EXPECT_EQ(run["first"], next);
          next += run["count"].get<std::uint32_t>();
          if (run["owner"] == "training") {
            held.insert(run["holds"].is_null() ? "" : run["holds"].get<std::string>());
          }
        }
        EXPECT_EQ(next, shown["pool"]["chunks"]);
        return held.count("arena") > 0 && held.count("") == 0;
      },
      "all chunks to be told of");
  held.erase("arena");
  held.erase("persistent");
  held.erase("spare");
  EXPECT_EQ(held, std::set<std::string>{});
  EXPECT_EQ(job.stop(), 0);
}

TEST_F(pool_process_test, a_server_takes_what_training_holds_and_training_takes_it_back) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  auto serving = server();
  std::uint64_t reclaimed = 0;
  for (auto left = repeated(50, 10); left > 0 || reclaimed == 0; left -= left > 0 ? 1 : 0) {
    auto const said = serving.line();
    ASSERT_EQ(said.rfind("served", 0), 0U) << said;
    reclaimed += std::stoull(said.substr(said.rfind(' ')));
  }
  auto const now = status();
  EXPECT_EQ(now["pool"]["writer"], "server");
  EXPECT_GT(now["handovers"]["count"].get<int>(), 0);
  EXPECT_EQ(accounted(now), pool_bytes);
  EXPECT_EQ(serving.stop(), 0);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, a_stopped_trainer_keeps_its_memory_and_the_demand_is_withdrawn) {
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  auto const serving = memhandover::serving_pool::join({.runtime_dir = folder_});
  job.hold();
  auto const held = serving->usage().training_bytes;
  ASSERT_GT(held, 0U);
  try {
    (void)serving->acquire(pool_bytes - 8_MiB, std::chrono::steady_clock::now() + 200ms);
    ADD_FAILURE() << "memory was taken from a process that cannot have let go of it";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::deadline_exceeded) << why.what();
    EXPECT_NE(std::string{why.what()}.find(std::to_string(job.pid())), std::string::npos)
        << why.what();
  }
  EXPECT_EQ(serving->usage().training_bytes, held);
  EXPECT_EQ(serving->usage().serving_bytes, 0U);
  ASSERT_EQ(::kill(job.pid(), SIGCONT), 0);
  await(
      [&] {
        try {
          auto const taken =
              serving->acquire(pool_bytes - 24_MiB, std::chrono::steady_clock::now() + 10s);
          return taken.bytes() >= pool_bytes - 24_MiB;
        } catch (error const&) {
          return false;  // persistent memory, which comes and goes in these jobs, was in the way
        }
      },
      "memory to be had from the job that goes on");
  EXPECT_EQ(job.stop(), 0);
}

TEST_F(pool_process_test, a_broker_that_does_not_listen_any_more_is_waited_for) {
  auto const lock_file = folder_ + "/broker.lock";
  memhandover::unique_fd ending{
      ::open(lock_file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR)};
  ASSERT_EQ(::flock(ending.get(), LOCK_EX), 0);
  memhandover::unique_fd const watch{::inotify_init1(IN_CLOEXEC)};
  ASSERT_GE(::inotify_add_watch(watch.get(), lock_file.c_str(), IN_CLOSE_WRITE), 0);
  auto found = std::async(std::launch::async, [this] {
    memhandover::broker_options options;
    options.runtime_dir = folder_;
    return memhandover::ensure_broker(options);
  });
  // A broker that has found its place taken has closed the file.
  pollfd closed{watch.get(), POLLIN, 0};
  constexpr int patience_ms = 10'000;
  ASSERT_EQ(::poll(&closed, 1, patience_ms), 1);
  ending.reset();
  EXPECT_TRUE(found.get());
}

TEST_F(pool_process_test, a_second_server_is_refused_by_name) {
  auto first = server();
  child second{"server", {folder_, server_bytes}};
  auto const said = second.line();
  EXPECT_NE(said.find("already_exists"), std::string::npos) << said;
  EXPECT_NE(said.find(std::to_string(first.pid())), std::string::npos) << said;
  expect_served(first);
}

TEST_F(pool_process_test, a_join_that_cannot_be_read_takes_no_place) {
  auto job = trainer();
  auto const joining = ::fork();
  ASSERT_GE(joining, 0);
  if (joining == 0) {
    int code = 1;
    int ends[2];
    if (auto const socket = memhandover::connect_to_broker(folder_); socket && ::pipe(ends) == 0) {
      memhandover::send_message(
          socket->get(),
          {{"type", "join"}, {"version", memhandover::protocol_version}, {"name", 3}}, {ends[0]});
      auto const answer = memhandover::receive_message(socket->get(), 10'000);
      code = answer && answer->body["type"] == "error" ? 0 : 2;
    }
    ::_exit(code);
  }
  int status_of_joining = -1;
  ASSERT_EQ(::waitpid(joining, &status_of_joining, 0), joining);
  EXPECT_EQ(status_of_joining, 0) << "it was not refused";
  EXPECT_EQ(status()["clients"].size(), 1U);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, the_broker_ends_when_nobody_needs_it) {
  ::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "50", 1);
  auto job = trainer();
  auto const broker = memhandover::broker_pid(folder_);
  EXPECT_EQ(job.stop(), 0);
  await([&] { return ::kill(broker, 0) != 0; }, "the broker's end");
}

TEST_F(pool_process_test, memory_waits_for_the_last_forked_descendant_and_that_one_is_ended) {
  auto job = trainer(8);
  EXPECT_EQ(job.line(), "committed");
  job.kill();
  expect_everything_free();
}

TEST_F(pool_process_test, strays_that_alone_keep_a_pool_are_found_and_ended) {
  auto job = trainer(2);
  EXPECT_EQ(job.line(), "committed");
  auto const id = std::stoull(status()["pool"]["id"].get<std::string>(), nullptr, 16);
  auto find = [id] {
    auto const pools = memhandover::find_pools();
    auto const found =
        std::find_if(pools.begin(), pools.end(), [id](auto const& pool) { return pool.id == id; });
    return found == pools.end() ? std::nullopt : std::optional{*found};
  };
  using role = memhandover::pool_holder::role;
  auto count = [](memhandover::found_pool const& pool, role is) {
    return std::count_if(pool.holders.begin(), pool.holders.end(),
                         [is](auto const& holder) { return holder.is == is; });
  };
  auto const used = find();
  ASSERT_TRUE(used);
  EXPECT_FALSE(used->orphaned());
  EXPECT_EQ(used->runtime_dir, folder_);
  EXPECT_EQ(used->shape.bytes(), pool_bytes);
  EXPECT_EQ(count(*used, role::broker), 1);
  EXPECT_EQ(count(*used, role::client), 1);
  EXPECT_EQ(count(*used, role::other), 2);
  EXPECT_EQ(memhandover::end_orphan(*used), 0);

  // Stopped, so that the job does not start another broker before it dies.
  job.hold();
  ASSERT_EQ(::kill(memhandover::broker_pid(folder_), SIGKILL), 0);
  job.kill();
  await([&] { return !find() || find()->holders.size() == 2; }, "broker and job to be gone");
  auto const left = find();
  ASSERT_TRUE(left) << "the workers hold it";
  EXPECT_TRUE(left->orphaned());
  EXPECT_EQ(memhandover::end_orphan(*left), 2);
  await([&] { return !find(); }, "the pool's end");
}

TEST_F(pool_process_test, training_killed_in_handovers_leaves_an_exact_ledger) {
  auto serving = server();
  for (int i = 0; i < kills_; ++i) {
    auto job = trainer(i % 4 == 0 ? 2 : 0);
    ASSERT_EQ(job.line(), "committed");
    expect_served(serving);
    some_time(20ms);
    job.kill();
    expect_served(serving);
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(serving.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, a_server_killed_in_handovers_leaves_training_going_and_can_come_back) {
  auto job = trainer();
  ASSERT_EQ(job.line(), "committed");
  for (int i = 0; i < kills_; ++i) {
    auto serving = server();
    expect_served(serving);
    some_time(20ms);
    serving.kill();
    await(
        [&] {
          auto const now = status();
          return now["pool"]["writer"] == "broker" && now["pool"]["serving_bytes"] == 0;
        },
        "the broker to take over");
    auto const commits = status()["clients"][0]["commits"].get<std::uint64_t>();
    ASSERT_EQ(accounted(status()), pool_bytes);
    (void)commits;
  }
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, a_job_and_a_server_that_die_together_leave_nothing_behind) {
  auto lasting = trainer();
  for (int i = 0; i < kills_; ++i) {
    auto job = trainer();
    auto serving = server();
    ASSERT_EQ(job.line(), "committed");
    expect_served(serving);
    some_time(5ms);
    ::kill(job.pid(), SIGKILL);
    some_time(500us);
    serving.kill();
    job.kill();
    await(
        [&] {
          auto const now = status();
          return now["clients"].size() == 1 && now["pool"]["serving_bytes"] == 0;
        },
        "what both held to be free");
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(lasting.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, a_broker_killed_in_handovers_is_replaced_and_the_pool_goes_on) {
  auto job = trainer();
  ASSERT_EQ(job.line(), "committed");
  auto serving = server();
  for (int i = 0; i < kills_; ++i) {
    expect_served(serving);
    some_time(20ms);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    expect_served(serving);
    await_another_broker(broker);
    auto const now = status();
    ASSERT_EQ(now["clients"].size(), 2U);
    ASSERT_EQ(accounted(now), pool_bytes);
  }
  EXPECT_EQ(serving.stop(), 0);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(pool_process_test, whoever_dies_while_there_is_no_broker_is_taken_back_by_the_next) {
  auto serving = server();
  for (int i = 0; i < std::max(2, kills_ / 4); ++i) {
    auto job = trainer(1);
    ASSERT_EQ(job.line(), "committed");
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    job.kill();
    expect_served(serving);
    await(
        [&] {
          auto const now = memhandover::broker_pid(folder_);
          return now > 0 && now != broker && status()["clients"].size() == 1;
        },
        "the next broker to take the dead job's memory back");
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(serving.stop(), 0);
  expect_everything_free();
}

}  // namespace
}  // namespace sluice::test

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::warn);
  if (int const code = sluice::test::run_role(argc, argv); code >= 0) {
    return code;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
