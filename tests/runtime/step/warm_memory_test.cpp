/// What of a server's memory outlives it: real servers that are killed, and their successors.

#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;

class warm_memory_test : public pool_process_test {
 protected:
  void SetUp() override {
    pool_process_test::SetUp();
    (void)::setenv("SLUICE_SERVER_GRACE_MS", "600000", 1);
  }
  void TearDown() override {
    pool_process_test::TearDown();
    (void)::unsetenv("SLUICE_SERVER_GRACE_MS");
  }

  /// A server that has done these things.
  child warm(std::vector<std::string> const& actions) const {
    std::vector<std::string> arguments{folder_};
    arguments.insert(arguments.end(), actions.begin(), actions.end());
    child started{"warm", arguments};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }
  void die(child& server) {
    server.kill();
    await([this] { return status()["pool"]["writer"] == "broker" && servers() == 0; },
          "the broker to notice");
  }
  [[nodiscard]] int servers() const {
    auto const now = status();
    return static_cast<int>(
        std::count_if(now["clients"].begin(), now["clients"].end(),
                      [](auto const& client) { return client["kind"] == "server"; }));
  }
  [[nodiscard]] std::uint64_t pool_field(char const* name) const {
    return status()["pool"][name].get<std::uint64_t>();
  }
  /// Keeps the pool, so that it is there after all servers.
  [[nodiscard]] memhandover::pool_presence presence() const {
    return memhandover::open_pool({.runtime_dir = folder_});
  }
};

TEST_F(warm_memory_test, a_successor_finds_the_very_bytes_that_a_killed_server_published) {
  auto const kept = presence();
  auto first = warm({"publish:bert:8", "scatter:vad:5", "take:3"});
  EXPECT_EQ(first.line(), "published bert");
  EXPECT_EQ(first.line(), "published vad");
  EXPECT_EQ(first.line(), "took 3");
  die(first);
  EXPECT_EQ(pool_field("left_bytes"), 13_MiB);
  EXPECT_EQ(pool_field("serving_bytes"), 13_MiB) << "what was not published is free at once";
  EXPECT_EQ(accounted(status()), pool_bytes);
  auto second = warm({"inherited", "claim:vad", "claim:bert", "inherited"});
  EXPECT_EQ(second.line(), "inherited bert vad");
  EXPECT_EQ(second.line(), "claimed vad");
  EXPECT_EQ(second.line(), "claimed bert");
  EXPECT_EQ(second.line(), "inherited");
  EXPECT_EQ(pool_field("left_bytes"), 0);
  EXPECT_EQ(pool_field("serving_bytes"), 13_MiB);
  EXPECT_EQ(second.stop(), 128 + SIGTERM);
}

TEST_F(warm_memory_test, what_was_claimed_is_left_again_when_the_successor_dies_too) {
  auto const kept = presence();
  auto first = warm({"publish:a:4", "publish:b:4"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  auto second = warm({"claim:a"});
  EXPECT_EQ(second.line(), "claimed a");
  std::map<bool, std::uint64_t> chunks;
  auto const shown = memhandover::query_chunks(folder_);
  for (auto const& run : shown["runs"]) {
    if (run["owner"] == "serving") {
      chunks[run.contains("slot")] += run["count"].get<std::uint64_t>();
    }
  }
  auto const chunk_bytes = shown["pool"]["chunk_bytes"].get<std::uint64_t>();
  EXPECT_EQ(chunks[true] * chunk_bytes, 4_MiB);
  EXPECT_EQ(chunks[false] * chunk_bytes, 4_MiB) << "what is left has no slot";
  die(second);
  auto third = warm({"claim:a", "claim:b"});
  EXPECT_EQ(third.line(), "claimed a");
  EXPECT_EQ(third.line(), "claimed b");
}

TEST_F(warm_memory_test, memory_that_was_claimed_goes_back_with_its_placement) {
  auto const kept = presence();
  auto first = warm({"publish:a:4", "scatter:b:4"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  auto second = warm({"claim:a", "claim:b", "drop", "inherited", "take:60"});
  EXPECT_EQ(second.line(), "claimed a");
  EXPECT_EQ(second.line(), "claimed b");
  EXPECT_EQ(second.line(), "dropped");
  EXPECT_EQ(second.line(), "inherited");
  EXPECT_EQ(second.line(), "took 60");
}

TEST_F(warm_memory_test, what_is_released_is_free_and_the_rest_stays) {
  auto const kept = presence();
  auto first = warm({"publish:a:4", "publish:b:4"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  auto second = warm({"let-go:a", "inherited", "claim:a"});
  EXPECT_EQ(second.line(), "let go a");
  EXPECT_EQ(second.line(), "inherited b");
  EXPECT_EQ(second.line(), "nothing is left as a");
  EXPECT_EQ(pool_field("left_bytes"), 4_MiB);
}

TEST_F(warm_memory_test, the_successors_own_need_comes_before_what_it_has_not_claimed) {
  auto const kept = presence();
  auto first = warm({"publish:a:30", "publish:b:30"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  auto second = warm({"claim:a", "take:32", "inherited"});
  EXPECT_EQ(second.line(), "claimed a");
  EXPECT_EQ(second.line(), "took 32");
  EXPECT_EQ(second.line(), "inherited");
}

TEST_F(warm_memory_test, training_that_needs_the_memory_does_not_wait_for_the_grace) {
  auto const kept = presence();
  auto first = warm({"publish:a:30", "publish:b:30"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  EXPECT_EQ(pool_field("grantable_bytes"), 4_MiB);
  auto job = trainer();
  EXPECT_EQ(job.line(), "committed");
  await([&] { return pool_field("training_bytes") >= 40_MiB; }, "training to have its memory");
  auto second = warm({"inherited"});
  EXPECT_THAT(second.line(), testing::Not(HasSubstr(" a"))) << "its chunks are training's";
}

TEST_F(warm_memory_test, what_nobody_claims_is_free_when_the_grace_is_over) {
  (void)::setenv("SLUICE_SERVER_GRACE_MS", "300", 1);
  auto const kept = presence();
  auto first = warm({"publish:a:30"});
  EXPECT_EQ(first.line(), "published a");
  die(first);
  await([&] { return pool_field("serving_bytes") == 0; }, "the end of the grace");
  auto second = warm({"inherited", "publish:b:30", "take:1"});
  EXPECT_EQ(second.line(), "inherited");
  EXPECT_EQ(second.line(), "published b");
  EXPECT_EQ(second.line(), "took 1");
}

TEST_F(warm_memory_test, the_grace_ends_for_a_successor_too) {
  (void)::setenv("SLUICE_SERVER_GRACE_MS", "1000", 1);
  auto const kept = presence();
  auto first = warm({"publish:a:30", "publish:b:8"});
  EXPECT_EQ(first.line(), "published a");
  EXPECT_EQ(first.line(), "published b");
  die(first);
  auto second = warm({"claim:b"});
  EXPECT_EQ(second.line(), "claimed b");
  await([&] { return pool_field("serving_bytes") == 8_MiB; }, "the end of the grace");
  EXPECT_EQ(pool_field("left_bytes"), 0);
  EXPECT_EQ(status()["pool"]["writer"], "server");
}

TEST_F(warm_memory_test, without_a_grace_everything_is_free_at_once) {
  (void)::setenv("SLUICE_SERVER_GRACE_MS", "0", 1);
  auto const kept = presence();
  auto first = warm({"publish:a:30"});
  EXPECT_EQ(first.line(), "published a");
  die(first);
  EXPECT_EQ(pool_field("serving_bytes"), 0);
}

TEST_F(warm_memory_test, a_grace_that_is_no_time_is_refused_by_name) {
  for (auto const* value : {"ten", "-1", "10s", "99999999999999"}) {
    (void)::setenv("SLUICE_SERVER_GRACE_MS", value, 1);
    try {
      auto const kept = presence();
      ADD_FAILURE() << value << " was taken";
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::invalid_argument);
      EXPECT_THAT(why.what(), HasSubstr(std::string{"SLUICE_SERVER_GRACE_MS is "} + value));
    }
  }
}

TEST_F(warm_memory_test, a_server_that_ends_in_order_leaves_nothing) {
  auto const kept = presence();
  auto gone = [this] { return servers() == 0; };
  auto first = warm({"publish:a:8", "end"});
  EXPECT_EQ(first.line(), "published a");
  await(gone, "the server's end");
  EXPECT_EQ(pool_field("serving_bytes"), 0);
  auto second = warm({"inherited"});
  EXPECT_EQ(second.line(), "inherited");
}

TEST_F(warm_memory_test, what_is_left_outlives_the_broker_if_somebody_keeps_the_pool) {
  auto job = child{"trainer", {folder_, std::to_string(4_MiB), "0"}};
  EXPECT_EQ(job.line(), "joined");
  auto first = warm({"publish:a:8"});
  EXPECT_EQ(first.line(), "published a");
  die(first);
  auto const broker = kill_broker();
  ASSERT_GT(broker, 0);
  await_another_broker(broker);
  auto second = warm({"claim:a"});
  EXPECT_EQ(second.line(), "claimed a");
}

TEST_F(warm_memory_test, server_and_broker_may_die_together) {
  auto job = child{"trainer", {folder_, std::to_string(4_MiB), "0"}};
  EXPECT_EQ(job.line(), "joined");
  auto first = warm({"publish:a:8"});
  EXPECT_EQ(first.line(), "published a");
  auto const broker = kill_broker();
  ASSERT_GT(broker, 0);
  first.kill();
  await_another_broker(broker);
  auto second = warm({"claim:a"});
  EXPECT_EQ(second.line(), "claimed a");
}

TEST_F(warm_memory_test, a_server_killed_at_a_random_instant_leaves_nothing_torn) {
  auto const kept = presence();
  std::vector<std::string> actions;
  for (int i = 0; i < 200; ++i) {
    actions.push_back("publish:a:2");
    actions.push_back("publish:b:3");
  }
  for (int i = 0; i < std::max(5, kills_ / 5); ++i) {
    auto first = warm(actions);
    some_time(std::chrono::milliseconds{30});
    die(first);
    auto second = warm({"inherited"});
    auto const left = second.line();
    ASSERT_EQ(left.rfind("inherited", 0), 0U) << left;
    die(second);
    for (auto const* key : {"a", "b"}) {
      if (left.find(std::string{" "} + key) != std::string::npos) {
        auto third = warm({std::string{"claim:"} + key});
        ASSERT_EQ(third.line(), std::string{"claimed "} + key);
        die(third);
      }
    }
    ASSERT_EQ(accounted(status()), pool_bytes);
  }
}

}  // namespace
}  // namespace sluice::test
