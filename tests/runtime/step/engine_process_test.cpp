/// Engines in a pool, as real processes that are killed at random instants, beside training and a server.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

class engine_process_test : public pool_process_test {
 protected:
  child engine(std::uint64_t bytes, int workers = 0) {
    child started{"engine", {folder_, std::to_string(bytes), std::to_string(workers)}};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }
  /// One that asks for nothing and gives nothing back once it has grown, unless it is demanded.
  child steady_engine(std::uint64_t bytes) {
    child started{"engine", {folder_, std::to_string(bytes), "0", "steady"}};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }
  /// Waits until an engine beside a living server has had all that it wants; a demand may come before.
  static void await_grown(child& engine) {
    auto const first = engine.line();
    ASSERT_TRUE(first == "grown" || (first == "parked" && engine.line() == "grown")) << first;
  }
  /// Of the client that is that process; null if there is none.
  [[nodiscard]] nlohmann::json client(child const& who) const {
    auto const now = status();
    for (auto const& each : now["clients"]) {
      if (each["pid"] == who.pid()) {
        return each;
      }
    }
    return nullptr;
  }
  [[nodiscard]] std::uint64_t bytes_of(child const& who) const {
    auto const found = client(who);
    return found.is_null() ? 0 : found["bytes"].get<std::uint64_t>();
  }
  void await_bytes(child const& who, std::uint64_t least) {
    await([&] { return bytes_of(who) >= least; }, "an engine's memory");
  }
  /// Kills it; what it said before is no error.
  static void kill_sound(child& engine) {
    engine.kill();
    for (auto said = engine.line(); !said.empty(); said = engine.line()) {
      EXPECT_EQ(said.find("error"), std::string::npos) << said;
    }
  }
  [[nodiscard]] std::shared_ptr<memhandover::serving_pool> join_server(bool demands) const {
    return memhandover::serving_pool::join(
        {.runtime_dir = folder_, .demands_from_engines = demands});
  }
};

TEST_F(engine_process_test, an_engine_has_what_it_asked_for_and_says_what_it_holds) {
  auto running = engine(24_MiB);
  EXPECT_EQ(running.line(), "grown");
  await_bytes(running, 18_MiB);
  auto const now = status();
  EXPECT_EQ(now["pool"]["writer"], "broker");
  EXPECT_GE(now["pool"]["engine_bytes"].get<std::uint64_t>(), 18_MiB);
  EXPECT_EQ(now["pool"]["training_bytes"], 0);
  EXPECT_EQ(now["handovers"]["bytes_to_training"], 0);
  EXPECT_GE(now["handovers"]["bytes_to_engines"].get<std::uint64_t>(), 24_MiB);
  EXPECT_EQ(accounted(now), pool_bytes);
  EXPECT_EQ(now["clients"][0]["kind"], "engine");
  await([&] { return !client(running)["holdings"].empty(); }, "what it holds to be told");
  EXPECT_EQ(client(running)["holdings"][0]["holds"], "model");
  EXPECT_EQ(running.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, two_engines_and_a_job_share_a_pool_and_a_server_takes_from_all) {
  auto first = engine(16_MiB);
  auto second = engine(16_MiB);
  EXPECT_EQ(first.line(), "grown");
  EXPECT_EQ(second.line(), "grown");
  auto job = trainer();
  ASSERT_EQ(job.line(), "committed");
  auto serving = server();
  for (int left = std::max(kills_, 10); left > 0; --left) {
    expect_served(serving);
    auto const now = status();
    ASSERT_EQ(accounted(now), pool_bytes);
    ASSERT_EQ(now["clients"].size(), 4U);
  }
  EXPECT_EQ(first.line(), "parked");
  EXPECT_EQ(second.line(), "parked");
  EXPECT_EQ(serving.stop(), 0);
  await_bytes(first, 8_MiB);
  await_bytes(second, 8_MiB);
  EXPECT_EQ(first.stop(), 0);
  EXPECT_EQ(second.stop(), 0);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, a_handover_takes_nothing_from_an_engine_that_it_is_not_to_ask) {
  auto running = steady_engine(24_MiB);
  EXPECT_EQ(running.line(), "grown");
  auto const serving = join_server(false);
  EXPECT_NO_THROW((void)serving->acquire(32_MiB, steady_clock::now() + 10s));
  running.hold();
  auto const before = serving->usage();
  ASSERT_EQ(before.engine_bytes, 24_MiB);
  EXPECT_EQ(before.kept_bytes, before.engine_bytes);
  EXPECT_EQ(before.free_bytes + before.engine_bytes, pool_bytes);
  try {
    (void)serving->acquire(pool_bytes - 4_MiB, steady_clock::now() + 10s);
    ADD_FAILURE() << "an engine was asked";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
    EXPECT_NE(std::string{why.what()}.find(std::to_string(running.pid()) + " (engine) keeps"),
              std::string::npos)
        << why.what();
  }
  EXPECT_EQ(serving->usage().engine_bytes, before.engine_bytes);
  ASSERT_EQ(::kill(running.pid(), SIGCONT), 0);
  EXPECT_EQ(running.stop(), 0);
}

TEST_F(engine_process_test, one_that_is_to_be_asked_is_parked_and_comes_back) {
  auto running = engine(24_MiB);
  EXPECT_EQ(running.line(), "grown");
  auto const serving = join_server(true);
  {
    auto const most = serving->acquire(pool_bytes - 4_MiB, steady_clock::now() + 10s);
    EXPECT_LE(serving->usage().engine_bytes, 4_MiB);
    EXPECT_EQ(running.line(), "parked");
  }
  await_bytes(running, 18_MiB);
  EXPECT_EQ(running.stop(), 0);
}

TEST_F(engine_process_test, one_that_rests_is_asked_before_one_that_answers_requests) {
  auto busy = steady_engine(24_MiB), rests = steady_engine(12_MiB);
  EXPECT_EQ(busy.line(), "grown");
  EXPECT_EQ(rests.line(), "grown");
  auto const note = [&](child const& of, bool in_use) {
    auto const said = client(of);
    memhandover::give_order(
        folder_, {{"type", "use"},
                  {"pool_id", std::stoull(status()["pool"]["id"].get<std::string>(), nullptr, 16)},
                  {"slot", said["slot"]},
                  {"pid", said["pid"]},
                  {"in_use", in_use}});
    EXPECT_EQ(client(of)["in_use"], in_use);
  };
  auto const serving = join_server(true);
  note(busy, true);
  {
    auto const some = serving->acquire(pool_bytes - 24_MiB - 6_MiB, steady_clock::now() + 10s);
    EXPECT_EQ(rests.line(), "parked");
    EXPECT_EQ(bytes_of(busy), 24_MiB);
  }
  await_bytes(rests, 12_MiB);
  note(busy, false);
  auto const some = serving->acquire(pool_bytes - 24_MiB - 6_MiB, steady_clock::now() + 10s);
  EXPECT_EQ(busy.line(), "parked");  // which has most
  EXPECT_EQ(busy.stop(), 0);
  EXPECT_EQ(rests.stop(), 0);
}

TEST_F(engine_process_test, what_is_no_engine_does_not_rest) {
  auto job = trainer();
  ASSERT_EQ(job.line(), "committed");
  auto const said = client(job);
  try {
    memhandover::give_order(
        folder_, {{"type", "use"}, {"slot", said["slot"]}, {"pid", said["pid"]}, {"in_use", true}});
    ADD_FAILURE() << "it is noted of a job";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unsupported);
  }
  EXPECT_EQ(job.stop(), 0);
}

TEST_F(engine_process_test, a_stopped_engine_keeps_its_memory_and_the_demand_is_withdrawn) {
  auto running = steady_engine(24_MiB);
  EXPECT_EQ(running.line(), "grown");
  auto const serving = join_server(true);
  running.hold();
  auto const held = serving->usage().engine_bytes;
  ASSERT_EQ(held, 24_MiB);
  try {
    (void)serving->acquire(pool_bytes - 4_MiB, steady_clock::now() + 200ms);
    ADD_FAILURE() << "memory was taken from a process that cannot have let go of it";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::deadline_exceeded) << why.what();
    EXPECT_NE(std::string{why.what()}.find("engine (pid " + std::to_string(running.pid())),
              std::string::npos)
        << why.what();
  }
  EXPECT_EQ(serving->usage().engine_bytes, held);
  ASSERT_EQ(::kill(running.pid(), SIGCONT), 0);
  EXPECT_NO_THROW((void)serving->acquire(pool_bytes - 4_MiB, steady_clock::now() + 10s));
  EXPECT_EQ(running.stop(), 0);
}

TEST_F(engine_process_test, one_killed_in_handovers_leaves_an_exact_ledger_and_the_others_go_on) {
  auto serving = server();
  auto job = trainer();
  ASSERT_EQ(job.line(), "committed");
  auto lasting = engine(8_MiB);
  await_grown(lasting);
  for (int i = 0; i < kills_; ++i) {
    auto running = engine(24_MiB, i % 4 == 0 ? 2 : 0);
    expect_served(serving);
    some_time(20ms);
    kill_sound(running);
    expect_served(serving);
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(serving.stop(), 0);
  await_bytes(lasting, 4_MiB);
  EXPECT_EQ(lasting.stop(), 0);
  EXPECT_EQ(job.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test,
       what_a_dead_one_held_waits_for_its_last_descendant_and_that_one_is_ended) {
  auto running = engine(24_MiB, 8);
  EXPECT_EQ(running.line(), "grown");
  running.kill();
  expect_everything_free();
}

TEST_F(engine_process_test, a_server_killed_in_handovers_leaves_engines_going) {
  auto running = engine(24_MiB);
  ASSERT_EQ(running.line(), "grown");
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
    await_bytes(running, 12_MiB);
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(running.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, a_broker_killed_in_handovers_is_replaced_and_knows_the_engines_again) {
  auto first = engine(16_MiB);
  auto second = engine(16_MiB);
  ASSERT_EQ(first.line(), "grown");
  ASSERT_EQ(second.line(), "grown");
  auto serving = server();
  for (int i = 0; i < kills_; ++i) {
    expect_served(serving);
    some_time(20ms);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    expect_served(serving);
    await_another_broker(broker);
    ASSERT_EQ(accounted(status()), pool_bytes);
    ASSERT_EQ(client(first)["kind"], "engine");
    ASSERT_EQ(client(second)["kind"], "engine");
  }
  EXPECT_EQ(serving.stop(), 0);
  EXPECT_EQ(first.stop(), 0);
  EXPECT_EQ(second.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, without_a_server_a_new_broker_grants_to_the_engines_that_it_adopts) {
  auto running = engine(24_MiB);
  ASSERT_EQ(running.line(), "grown");
  auto const broker = kill_broker();
  ASSERT_GT(broker, 0);
  await_another_broker(broker);
  auto const granted = status()["handovers"]["bytes_to_engines"].get<std::uint64_t>();
  await(
      [&] {
        return status()["handovers"]["bytes_to_engines"].get<std::uint64_t>() > granted + 8_MiB;
      },
      "the engine to give back and get again");
  EXPECT_EQ(accounted(status()), pool_bytes);
  EXPECT_EQ(running.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, one_that_dies_while_there_is_no_broker_is_taken_back_by_the_next) {
  auto serving = server();
  for (int i = 0; i < std::max(2, kills_ / 4); ++i) {
    auto running = engine(24_MiB, 1);
    await_grown(running);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    kill_sound(running);
    expect_served(serving);
    await(
        [&] {
          auto const now = memhandover::broker_pid(folder_);
          return now > 0 && now != broker && status()["clients"].size() == 1;
        },
        "the next broker to take the dead engine's memory back");
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
  EXPECT_EQ(serving.stop(), 0);
  expect_everything_free();
}

/// What the broker answers to a join with these words.
nlohmann::json answer_to_join(std::string const& folder, nlohmann::json const& words) {
  int ends[2];
  auto const socket = memhandover::connect_to_broker(folder);
  if (!socket || ::pipe(ends) != 0) {
    return nullptr;
  }
  memhandover::unique_fd const life{ends[0]};
  memhandover::unique_fd const held{ends[1]};
  nlohmann::json join{{"type", "join"}, {"version", memhandover::protocol_version}};
  join.update(words);
  memhandover::send_message(socket->get(), join, {life.get()});
  auto const answer = memhandover::receive_message(socket->get(), 10'000);
  return answer ? answer->body : nlohmann::json{};
}

TEST_F(engine_process_test, kinds_and_versions_that_a_broker_does_not_know_are_refused_by_name) {
  auto running = engine(8_MiB);
  for (auto const& words : {nlohmann::json{{"kind", "tenant"}}, nlohmann::json::object()}) {
    auto const unknown = answer_to_join(folder_, words);
    EXPECT_EQ(unknown["type"], "error");
    EXPECT_EQ(unknown["kind"], static_cast<int>(error_kind::invalid_argument));
    EXPECT_NE(unknown["message"].get<std::string>().find("training, server, engine"),
              std::string::npos)
        << unknown;
  }
  auto const older =
      answer_to_join(folder_, {{"kind", "engine"}, {"version", memhandover::protocol_version - 1}});
  EXPECT_EQ(older["kind"], static_cast<int>(error_kind::unsupported)) << older;
  EXPECT_EQ(status()["clients"].size(), 1U);
  EXPECT_EQ(running.stop(), 0);
  expect_everything_free();
}

TEST_F(engine_process_test, a_server_is_no_tenant) {
  memhandover::broker_options options;
  options.runtime_dir = folder_;
  try {
    (void)memhandover::tenant_client::join(options, memhandover::client_kind::server, "x", {});
    ADD_FAILURE();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument) << why.what();
  }
}

}  // namespace
}  // namespace sluice::test
