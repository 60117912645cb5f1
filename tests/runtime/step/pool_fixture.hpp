/// What the tests of the pool with real processes share: a runtime folder of their own, and the roles
/// in it. The seed of a run is printed; SLUICE_TEST_SEED repeats it, SLUICE_TEST_KILLS sets how many
/// of each kind die.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "tests/from_environment.hpp"
#include "tests/runtime/step/process_roles.hpp"

namespace sluice::test {

class pool_process_test : public testing::Test {
 protected:
  static constexpr int first_device = -1;  ///< the pool of a join that names no device
  static constexpr std::uint64_t bytes_of_a_mebibyte = 1ULL << 20U;

  void SetUp() override {
    auto pattern = (std::filesystem::temp_directory_path() / "sluice-pool-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    ::setenv("SLUICE_BROKER", "/proc/self/exe", 1);
    ::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000", 1);
    RecordProperty("seed", std::to_string(seed_));
    std::printf("seed %u, %d kills\n", seed_, kills_);
    random_.seed(seed_);
  }

  void TearDown() override {
    if (auto const broker = memhandover::broker_pid(folder_); broker > 0) {
      ::kill(broker, SIGTERM);
      await([&] { return memhandover::broker_pid(folder_) == 0; }, "the broker's end");
    }
    std::filesystem::remove_all(folder_);
  }

  /// Of the first pool, and of each in `pools` if there are several.
  [[nodiscard]] nlohmann::json status() const { return memhandover::query_status(folder_); }

  /// Asks until it is so; the pool says things through its broker, and there is nothing to be woken
  /// by.
  template <typename Condition>
  void await(Condition&& condition, std::string const& what) {
    auto const deadline = std::chrono::steady_clock::now() + std::chrono::seconds{30};
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "waited in vain for " << what;
      ::poll(nullptr, 0, 2);
    }
  }

  /// Which one it was; 0 if there is none, or it cannot be killed.
  [[nodiscard]] int kill_broker() const {
    auto const broker = memhandover::broker_pid(folder_);
    return broker > 0 && ::kill(broker, SIGKILL) == 0 ? broker : 0;
  }

  void await_another_broker(int than) {
    await(
        [&] {
          auto const now = memhandover::broker_pid(folder_);
          return now > 0 && now != than;
        },
        "another broker");
  }

  /// All chunks are accounted for, each once.
  static std::uint64_t accounted(nlohmann::json const& status) {
    auto const& pool = status["pool"];
    return pool["free_bytes"].get<std::uint64_t>() + pool["dirty_bytes"].get<std::uint64_t>() +
           pool["training_bytes"].get<std::uint64_t>() +
           pool["serving_bytes"].get<std::uint64_t>() + pool["engine_bytes"].get<std::uint64_t>();
  }

  void expect_everything_free() {
    await(
        [&] {
          auto const now = status();
          return now["clients"].empty() &&
                 now["pool"]["free_bytes"].get<std::uint64_t>() +
                         now["pool"]["dirty_bytes"].get<std::uint64_t>() ==
                     pool_bytes;
        },
        "all chunks to be free");
    EXPECT_EQ(accounted(status()), pool_bytes);
  }

  /// Waits for a random time below `most`.
  void some_time(std::chrono::microseconds most) {
    auto const until =
        std::chrono::steady_clock::now() +
        std::chrono::microseconds{random_() % static_cast<std::uint64_t>(most.count())};
    while (std::chrono::steady_clock::now() < until) {
      ::poll(nullptr, 0, 0);
    }
  }

  /// The server's next answer; an error of either side fails the test.
  static void expect_served(child& server) {
    for (;;) {
      auto const said = server.line();
      ASSERT_FALSE(said.empty()) << "the server has ended";
      ASSERT_EQ(said.find("error"), std::string::npos) << said;
      // All that jobs hold can be had, so whatever is asked for can be given.
      ASSERT_NE(said.rfind("failed", 0), 0U) << said;
      if (said.rfind("served", 0) == 0) {
        return;
      }
    }
  }

  child trainer(int workers = 0, int device = first_device) {
    child started{"trainer",
                  {folder_, trainer_bytes, std::to_string(workers), std::to_string(device)}};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }
  /// A server of the pools of these devices, which it asks in turn.
  child server(std::vector<int> const& devices = {first_device}) {
    std::vector<std::string> arguments{folder_, server_bytes};
    for (auto const device : devices) {
      arguments.push_back(std::to_string(device));
    }
    child started{"server", arguments};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }

  static constexpr auto pool_bytes = 64 * bytes_of_a_mebibyte;
  static inline auto const trainer_bytes = std::to_string(40 * bytes_of_a_mebibyte);
  static inline auto const server_bytes = std::to_string(48 * bytes_of_a_mebibyte);

  std::string folder_;
  std::uint32_t seed_ =
      static_cast<std::uint32_t>(from_environment("SLUICE_TEST_SEED", std::random_device{}()));
  int kills_ = static_cast<int>(from_environment("SLUICE_TEST_KILLS", 100));
  std::mt19937 random_;
};

}  // namespace sluice::test
