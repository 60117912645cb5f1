/// One broker with the pools of several devices.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <future>
#include <optional>
#include <set>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/pool_search.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;

class several_pools_test : public pool_process_test {
 protected:
  void SetUp() override {
    pool_process_test::SetUp();
    (void)::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000", 1);
  }

  [[nodiscard]] std::vector<int> devices() const {
    auto const now = status();
    std::vector<int> result;
    for (auto const& pool : now.contains("pools") ? now["pools"] : nlohmann::json::array({now})) {
      result.push_back(pool["pool"]["device"].get<int>());
    }
    return result;
  }
  [[nodiscard]] memhandover::pool_presence open(memhandover::broker_options wanted) const {
    wanted.runtime_dir = folder_;
    return memhandover::open_pool(wanted);
  }
  [[nodiscard]] std::optional<error> why_not(memhandover::broker_options const& wanted) const {
    try {
      (void)open(wanted);
    } catch (error const& why) {
      return why;
    }
    return std::nullopt;
  }
  /// How many wait for a lock that somebody has on the file.
  static int waiting_for(memhandover::unique_fd const& file) {
    struct stat status {};
    EXPECT_EQ(::fstat(file.get(), &status), 0);
    auto const inode = ':' + std::to_string(status.st_ino) + ' ';
    std::ifstream locks{"/proc/locks"};
    int waiting = 0;
    for (std::string line; std::getline(locks, line);) {
      waiting +=
          line.find("-> FLOCK") != std::string::npos && line.find(inode) != std::string::npos;
    }
    return waiting;
  }
  static std::uint64_t commits(child& job) {
    ::kill(job.pid(), SIGUSR1);
    for (;;) {
      auto const said = job.line();
      if (said.empty() || said.rfind("commits ", 0) == 0) {
        return said.empty() ? 0 : std::stoull(said.substr(8));
      }
    }
  }
};

TEST_F(several_pools_test, each_device_that_training_names_has_a_pool_of_its_own) {
  auto first = trainer(0, 0);
  auto second = trainer(0, 1);
  EXPECT_EQ(first.line(), "committed");
  EXPECT_EQ(second.line(), "committed");
  auto const now = status();
  ASSERT_EQ(now["pools"].size(), 2U);
  std::set<std::string> ids;
  for (int device : {0, 1}) {
    auto const& pool = now["pools"][static_cast<std::size_t>(device)];
    EXPECT_EQ(pool["pool"]["device"], device);
    EXPECT_EQ(accounted(pool), pool_bytes);
    ASSERT_EQ(pool["clients"].size(), 1U);
    EXPECT_EQ(pool["clients"][0]["pid"], (device == 0 ? first : second).pid());
    ids.insert(pool["pool"]["id"].get<std::string>());
  }
  EXPECT_EQ(ids.size(), 2U);
  EXPECT_EQ(now["pool"], now["pools"][0]["pool"]);
}

TEST_F(several_pools_test, who_names_no_device_gets_the_first_pool) {
  auto first = trainer(0, 3);
  auto second = trainer();
  EXPECT_EQ(devices(), std::vector<int>{3});
  EXPECT_EQ(status()["clients"].size(), 2U);
  EXPECT_FALSE(status().contains("pools"));
}

TEST_F(several_pools_test, the_pool_of_one_device_can_be_asked_about_alone) {
  auto first = trainer(0, 0);
  auto second = trainer(0, 1);
  auto const one = memhandover::query_status(folder_, 1);
  EXPECT_EQ(one["pool"]["device"], 1);
  EXPECT_FALSE(one.contains("pools"));
  auto const chunks = memhandover::query_chunks(folder_);
  ASSERT_EQ(chunks["pools"].size(), 2U);
  EXPECT_FALSE(chunks["pools"][1]["runs"].empty());
  auto const stories = memhandover::query_address(folder_, 0x20);
  ASSERT_EQ(stories["pools"].size(), 2U);
  EXPECT_EQ(stories["pools"][1]["pool"]["device"], 1);
  EXPECT_EQ(stories["pools"][1]["stays"], nlohmann::json::array());
  auto const story = memhandover::query_address(folder_, 0x20, 1);
  EXPECT_EQ(story, stories["pools"][1]);
  try {
    (void)memhandover::query_status(folder_, 7);
    FAIL() << "there is no pool of device 7";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::not_found);
    EXPECT_THAT(why.what(), HasSubstr("no pool of device 7"));
    EXPECT_THAT(why.what(), HasSubstr("devices 0, 1"));
  }
}

TEST_F(several_pools_test, a_pool_has_the_size_that_whoever_needs_it_first_names) {
  auto const first = open({.device = 0});
  auto const second = open({.device = 1, .pool_bytes = 16_MiB});
  auto const again = open({.device = 1, .pool_bytes = 32_MiB});
  EXPECT_EQ(memhandover::query_status(folder_, 0)["pool"]["bytes"], 64_MiB);
  EXPECT_EQ(memhandover::query_status(folder_, 1)["pool"]["bytes"], 16_MiB);
}

TEST_F(several_pools_test, a_server_takes_from_the_training_of_each_of_its_pools) {
  auto first = trainer(0, 0);
  auto second = trainer(0, 1);
  EXPECT_EQ(first.line(), "committed");
  EXPECT_EQ(second.line(), "committed");
  auto serving = server({0, 1});
  await(
      [&] {
        expect_served(serving);
        auto const now = status();
        return now["pools"][0]["handovers"]["count"] > 0 &&
               now["pools"][1]["handovers"]["count"] > 0;
      },
      "a handover in each pool");
  EXPECT_EQ(status()["pools"][1]["pool"]["writer"], "server");
  EXPECT_EQ(serving.stop(), 0);
  EXPECT_EQ(status()["pools"][1]["pool"]["serving_bytes"], 0);
}

TEST_F(several_pools_test, each_pool_may_have_a_server_of_its_own_and_no_second_one) {
  auto first = server({0});
  auto second = server({1});
  expect_served(first);
  expect_served(second);
  child third{"server", {folder_, server_bytes, "1"}};
  auto const said = third.line();
  EXPECT_THAT(said, HasSubstr("already_exists"));
  EXPECT_THAT(said, HasSubstr("host memory 1"));
  EXPECT_THAT(said, HasSubstr(std::to_string(second.pid())));
}

TEST_F(several_pools_test, what_cannot_be_is_refused_by_name_and_harms_no_other_pool) {
  auto job = trainer(0, 0);
  auto const number = why_not({.device = 99});
  ASSERT_TRUE(number);
  EXPECT_EQ(number->kind(), error_kind::invalid_argument);
  EXPECT_THAT(number->what(), HasSubstr("there is no device 99"));
  EXPECT_THAT(number->what(), testing::Not(HasSubstr("has the backend")));
  auto const gpu = why_not({.backend = "cuda", .device = 63});
  ASSERT_TRUE(gpu) << "no machine has so many GPUs";
  EXPECT_THAT(gpu->what(), HasSubstr("there can be no pool of device 63"));
  EXPECT_THAT(gpu->what(), HasSubstr("has the backend host, not cuda"));
  auto const much = why_not({.device = 1, .pool_bytes = 1ULL << 60U});
  ASSERT_TRUE(much);
  EXPECT_EQ(much->kind(), error_kind::out_of_memory);
  EXPECT_EQ(devices(), std::vector<int>{0});
  EXPECT_EQ(job.line(), "committed");
}

/// With a driver over the host's memory in place of the machine's, if it has one.
class gpu_pools_test : public several_pools_test {
 protected:
  void SetUp() override {
    several_pools_test::SetUp();
    (void)::setenv("LD_LIBRARY_PATH", SLUICE_FAKE_DRIVER_FOLDER, 1);
    (void)::setenv("FAKE_CUDA_DEVICES", "2", 1);
  }
  void TearDown() override {
    (void)::unsetenv("LD_LIBRARY_PATH");
    (void)::unsetenv("FAKE_CUDA_DELAY");
    (void)::unsetenv("FAKE_CUDA_DEVICES");
    several_pools_test::TearDown();
  }
};

TEST_F(gpu_pools_test, a_pool_on_each_gpu_is_made_by_a_process_of_its_own_while_another_is_used) {
  auto job = trainer(0, 0);
  EXPECT_EQ(job.line(), "committed");
  auto const first =
      open({.backend = "cuda", .device = 0, .pool_bytes = 64_MiB, .chunk_bytes = 2_MiB});
  auto const second =
      open({.backend = "cuda", .device = 1, .pool_bytes = 32_MiB, .chunk_bytes = 2_MiB});
  EXPECT_EQ(first.backend, memhandover::backend_kind::cuda);
  EXPECT_EQ(second.device, 1);
  auto const now = status();
  ASSERT_EQ(now["pools"].size(), 3U);
  EXPECT_EQ(now["pools"][0]["pool"]["backend"], "host");
  EXPECT_EQ(now["pools"][1]["pool"]["backend"], "cuda");
  EXPECT_EQ(now["pools"][1]["pool"]["chunks"], 32);
  EXPECT_EQ(now["pools"][2]["pool"]["device"], 1);
  EXPECT_EQ(now["pools"][2]["pool"]["bytes"], 32_MiB);
  EXPECT_EQ(accounted(now["pools"][2]), 32_MiB);
  auto const before = commits(job);
  await([&] { return commits(job) > before; }, "training to go on");
}

TEST_F(gpu_pools_test, the_broker_answers_while_it_has_a_pool_made) {
  (void)::setenv("FAKE_CUDA_DELAY", "cuMemCreate:200000000", 1);  // ns, for each of 16 chunks
  auto const kept = open({.device = 0});
  auto made = std::async(std::launch::async, [this] {
    return open({.backend = "cuda", .device = 0, .pool_bytes = 32_MiB, .chunk_bytes = 2_MiB});
  });
  int answers = 0;
  while (made.wait_for(std::chrono::seconds{0}) != std::future_status::ready) {
    if (!status().contains("pools")) {
      ++answers;
    }
  }
  EXPECT_GT(answers, 5) << "a question waited for the pool";
  EXPECT_EQ(made.get().backend, memhandover::backend_kind::cuda);
  EXPECT_EQ(status()["pools"].size(), 2U);
}

TEST_F(gpu_pools_test, a_gpu_that_is_not_there_is_refused_by_name) {
  auto const there =
      open({.backend = "cuda", .device = 1, .pool_bytes = 32_MiB, .chunk_bytes = 2_MiB});
  auto const missing = why_not({.backend = "cuda", .device = 2, .pool_bytes = 32_MiB});
  ASSERT_TRUE(missing);
  EXPECT_THAT(missing->what(), HasSubstr("there can be no pool of device 2: cannot use GPU 2"));
  auto const much = why_not({.backend = "cuda", .device = 0, .pool_bytes = 1ULL << 50U});
  ASSERT_TRUE(much);
  EXPECT_EQ(much->kind(), error_kind::out_of_memory);
  EXPECT_THAT(much->what(), HasSubstr("GPU 0 has"));
}

TEST_F(several_pools_test, a_pool_that_nobody_uses_is_given_back_while_others_live) {
  (void)::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "50", 1);
  auto stays = trainer(0, 0);
  auto goes = trainer(0, 1);
  auto const id = std::stoull(
      memhandover::query_status(folder_, 1)["pool"]["id"].get<std::string>(), nullptr, 16);
  EXPECT_EQ(goes.stop(), 0);
  auto held = [id] {
    auto const pools = memhandover::find_pools();
    return std::any_of(pools.begin(), pools.end(),
                       [id](auto const& pool) { return pool.id == id; });
  };
  await([&] { return !held(); }, "the memory of the second pool");
  EXPECT_EQ(devices(), std::vector<int>{0});
  auto const before = commits(stays);
  await([&] { return commits(stays) > before; }, "the other job's commits");
}

TEST_F(several_pools_test, who_has_opened_a_pool_keeps_that_one_alone) {
  (void)::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "50", 1);
  auto first = std::optional{open({.device = 0})};
  auto const second = open({.device = 1});
  EXPECT_EQ(devices(), (std::vector<int>{0, 1}));
  first.reset();
  await([&] { return devices() == std::vector<int>{1}; }, "the first pool to be given back");
}

TEST_F(several_pools_test, a_process_that_holds_several_pools_is_found_with_each) {
  auto serving = server({0, 1});
  std::set<int> found;
  for (auto const& pool : memhandover::find_pools()) {
    for (auto const& holder : pool.holders) {
      if (holder.pid == serving.pid()) {
        EXPECT_EQ(holder.is, memhandover::pool_holder::role::client);
        EXPECT_EQ(pool.runtime_dir, folder_);
        found.insert(pool.shape.device);
      }
    }
  }
  EXPECT_EQ(found, (std::set<int>{0, 1}));
}

TEST_F(several_pools_test, a_new_broker_adopts_every_pool_in_the_old_order) {
  auto first = trainer(0, 1);
  auto second = trainer(0, 0);
  auto serving = server({1, 0});
  auto ids = [this] {
    std::vector<std::string> result;
    auto const told = status();
    for (auto const& pool : told["pools"]) {
      result.push_back(pool["pool"]["id"].get<std::string>());
    }
    return result;
  };
  auto const before = ids();
  ASSERT_EQ(devices(), (std::vector<int>{1, 0}));
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    await_another_broker(broker);
    ASSERT_EQ(ids(), before);
    auto const told = status();
    for (auto const& pool : told["pools"]) {
      ASSERT_EQ(pool["clients"].size(), 2U);
      ASSERT_EQ(accounted(pool), pool_bytes);
    }
    expect_served(serving);
  }
}

TEST_F(several_pools_test, training_and_serving_go_on_while_there_is_no_broker) {
  auto first = trainer(0, 0);
  auto second = trainer(0, 1);
  EXPECT_EQ(first.line(), "committed");
  EXPECT_EQ(second.line(), "committed");
  auto serving = server({0, 1});
  expect_served(serving);
  // Whoever wants to start a broker waits for this lock.
  memhandover::unique_fd lock{
      ::open((folder_ + "/start.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)};
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  ASSERT_EQ(::kill(memhandover::broker_pid(folder_), SIGKILL), 0);
  await([&] { return memhandover::broker_pid(folder_) == 0; }, "the broker's end");
  // Two jobs, and the server for each of its pools.
  await([&] { return waiting_for(lock) == 4; }, "everybody to wait for the lock");
  for (int served = 0; served < 20; ++served) {
    expect_served(serving);
    ASSERT_FALSE(HasFailure());
  }
  for (auto* job : {&first, &second}) {
    auto const before = commits(*job);
    await([&] { return commits(*job) > before; }, "training to go on");
  }
  EXPECT_EQ(memhandover::broker_pid(folder_), 0);
  lock.reset();
  await([&] { return memhandover::broker_pid(folder_) > 0; }, "another broker");
  EXPECT_EQ(status()["pools"].size(), 2U);
}

}  // namespace
}  // namespace sluice::test
