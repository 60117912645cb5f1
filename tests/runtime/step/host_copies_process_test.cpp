/// Host copies with real processes that are killed: whose they are, and that the next broker has them.

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "tests/memhandover/disk_folder.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;

class host_copies_process_test : public pool_process_test {
 protected:
  static constexpr std::uint64_t budget = 17_MiB;  // eight slots, and a part of one
  static constexpr std::uint64_t all = 16_MiB;

  void SetUp() override {
    pool_process_test::SetUp();
    (void)::setenv("LD_LIBRARY_PATH", SLUICE_FAKE_DRIVER_FOLDER, 1);
  }
  void TearDown() override {
    broker_.reset();
    (void)::unsetenv("LD_LIBRARY_PATH");
    pool_process_test::TearDown();
  }

  [[nodiscard]] memhandover::broker_options wish(std::uint64_t host_copy_bytes) const {
    memhandover::broker_options wanted;
    wanted.runtime_dir = folder_;
    wanted.backend = "cuda";
    wanted.pool_bytes = pool_bytes;
    wanted.chunk_bytes = 2_MiB;
    wanted.host_copy_bytes = host_copy_bytes;
    return wanted;
  }
  void start_broker(std::uint64_t host_copy_bytes = budget) {
    broker_ = memhandover::ensure_broker(wish(host_copy_bytes));
  }
  child parker(int slots, std::string const& mischief = "", int device = first_device) {
    child started{"parker", {folder_, std::to_string(slots), mischief, std::to_string(device)}};
    EXPECT_EQ(said_by(started), "joined");
    return started;
  }
  /// Its next line that is none of its log, which is left in `log_`.
  std::string said_by(child& role) {
    for (;;) {
      auto said = role.line();
      if (said.empty() || said.front() != '[') {
        return said;
      }
      log_ += said + '\n';
    }
  }
  std::string answer_of(child& role) {
    EXPECT_EQ(::kill(role.pid(), SIGUSR1), 0);
    return said_by(role);
  }
  void expect_intact(child& holder) { EXPECT_EQ(answer_of(holder), "intact"); }
  /// Slots that a taker has now; it goes on when it is asked again.
  std::uint64_t taken_by(child& taker) {
    auto const said = answer_of(taker);
    EXPECT_EQ(said.rfind("has ", 0), 0U) << said;
    return said.rfind("has ", 0) == 0 ? std::stoull(said.substr(4)) : 0;
  }
  void await_clients(std::size_t count) {
    await([&] { return status()["clients"].size() == count; }, "the dead client to be taken back");
  }
  /// Its answer once it is back with a broker, of which its log tells.
  std::string answer_when_back(child& role) {
    auto const before = log_.size();
    await(
        [&] {
          (void)answer_of(role);
          return log_.find("back with a broker", before) != std::string::npos;
        },
        "a client to come back");
    return answer_of(role);
  }
  void lose_broker() {
    ASSERT_GT(kill_broker(), 0);
    broker_.reset();
  }
  [[nodiscard]] nlohmann::json copies() const { return status()["pool"]["host_copies"]; }
  [[nodiscard]] std::uint64_t free_bytes() const { return copies()["free_bytes"]; }

  std::string log_;
  memhandover::unique_fd broker_;  ///< keeps it
};

TEST_F(host_copies_process_test, status_says_their_bytes_and_the_pages_come_by_themselves) {
  start_broker();
  EXPECT_EQ(copies()["bytes"], all);
  EXPECT_EQ(copies()["free_bytes"], all);
  await([&] { return copies()["populated_bytes"] == all; }, "the pages of the host copies");
  auto holder = parker(3);
  EXPECT_EQ(free_bytes(), all - 6_MiB);
  expect_intact(holder);
  EXPECT_EQ(holder.stop(), 0);
  EXPECT_EQ(free_bytes(), all);
}

TEST_F(host_copies_process_test, without_a_budget_there_are_none) {
  start_broker(0);
  EXPECT_TRUE(copies().is_null());
  child job{"parker", {folder_, "1"}};
  EXPECT_EQ(job.line(), "none");
}

TEST_F(host_copies_process_test, a_budget_smaller_than_a_chunk_is_refused_with_the_numbers) {
  try {
    start_broker(1_MiB);
    ADD_FAILURE() << "it was not refused";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument);
    EXPECT_NE(std::string{why.what()}.find("1 MiB, but one takes 2 MiB"), std::string::npos)
        << why.what();
  }
}

TEST_F(host_copies_process_test, what_a_killed_client_held_is_free_and_no_others) {
  start_broker();
  auto survivor = parker(2);
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto victim = parker(6);
    EXPECT_EQ(free_bytes(), 0U);
    victim.kill();
    await([&] { return free_bytes() == all - 4_MiB; }, "the dead client's copies to be free");
    expect_intact(survivor);
  }
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, the_next_broker_adopts_table_and_bytes) {
  start_broker();
  auto survivor = parker(3);
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto victim = parker(4);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    broker_.reset();
    victim.kill();  // while there is nobody to see it
    await_another_broker(broker);
    await([&] { return status()["clients"].size() == 1; }, "the dead client to be taken back");
    EXPECT_EQ(copies()["bytes"], all);
    EXPECT_EQ(free_bytes(), all - 6_MiB);
    expect_intact(survivor);
  }
  auto newcomer = parker(5);
  EXPECT_EQ(free_bytes(), 0U);
  expect_intact(newcomer);
  EXPECT_EQ(newcomer.stop(), 0);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, the_next_broker_adopts_those_on_a_disk_as_well) {
  disk_folder const disk;
  if (disk.path().empty()) {
    GTEST_SKIP() << "there is no folder on a disk";
  }
  auto wanted = wish(4_MiB);
  wanted.host_copy_disk = {disk.path(), 12_MiB};
  broker_ = memhandover::ensure_broker(wanted);
  auto survivor = parker(4);
  expect_intact(survivor);
  for (int i = 0; i < std::max(3, kills_ / 10); ++i) {
    auto victim = parker(3);
    expect_intact(victim);
    auto const broker = kill_broker();
    ASSERT_GT(broker, 0);
    broker_.reset();
    victim.kill();
    await_another_broker(broker);
    await_clients(1);
    EXPECT_EQ(copies()["disk"]["bytes"], 12_MiB);
    EXPECT_EQ(copies()["disk"]["free_bytes"], 8_MiB);
    EXPECT_EQ(free_bytes(), 0U);
    expect_intact(survivor);
    EXPECT_TRUE(disk.is_empty());
  }
  auto newcomer = parker(4);
  EXPECT_EQ(copies()["disk"]["free_bytes"], 0U);
  expect_intact(newcomer);
  EXPECT_EQ(newcomer.stop(), 0);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, who_reached_a_broker_about_to_end_has_the_next_ones) {
  memhandover::unique_fd const ending{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  auto const path = folder_ + "/broker.sock";
  path.copy(static_cast<char*>(name.sun_path), sizeof name.sun_path - 1);
  ASSERT_EQ(::bind(ending.get(), reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
  ASSERT_EQ(::listen(ending.get(), 1), 0);
  (void)::setenv("SLUICE_HOST_COPY_BYTES", std::to_string(budget).c_str(), 1);
  child holder{"parker", {folder_, "3"}};
  (void)::unsetenv("SLUICE_HOST_COPY_BYTES");
  {
    memhandover::unique_fd const came{::accept4(ending.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    ASSERT_TRUE(came);
    std::filesystem::remove(path);
  }
  EXPECT_EQ(said_by(holder), "joined");
  EXPECT_EQ(copies()["bytes"], all) << "the next broker knows of them by the environment";
  EXPECT_EQ(
      copies()["held_bytes"].get<std::uint64_t>() + copies()["kept_bytes"].get<std::uint64_t>(),
      6_MiB);
  expect_intact(holder);
  EXPECT_EQ(holder.stop(), 0);
}

TEST_F(host_copies_process_test, pools_that_come_later_share_them_if_their_chunks_fit) {
  (void)::setenv("FAKE_CUDA_DEVICES", "3", 1);
  auto host = wish(budget);
  host.backend = "host";
  broker_ = memhandover::ensure_broker(host);
  auto larger = wish(0);
  larger.device = 2;
  larger.chunk_bytes = 4_MiB;
  auto first = parker(2, "", 0);
  auto second = parker(3, "", 1);
  auto const kept = memhandover::open_pool(larger);
  (void)::unsetenv("FAKE_CUDA_DEVICES");
  auto const pools = status()["pools"];
  ASSERT_EQ(pools.size(), 4U);
  auto const of = [&](std::size_t at) { return pools[at]["pool"]["host_copies"]; };
  EXPECT_EQ(of(0)["free_bytes"], all - 10_MiB);
  EXPECT_EQ(of(1)["free_bytes"], all - 10_MiB);
  EXPECT_EQ(of(2)["free_bytes"], all - 10_MiB);
  EXPECT_EQ(of(3)["bytes"], 0U);
  EXPECT_NE(of(3)["warning"].get<std::string>().find("chunks of 4 MiB"), std::string::npos);
  child without{"parker", {folder_, "1", "", "2"}};
  EXPECT_EQ(without.line(), "none");
  second.kill();
  await([&] { return status()["pools"][1]["pool"]["host_copies"]["free_bytes"] == all - 4_MiB; },
        "the dead client's copies to be free");
  expect_intact(first);
  EXPECT_EQ(first.stop(), 0);
}

TEST_F(host_copies_process_test, clients_of_a_pool_that_never_came_back_leave_nothing_behind) {
  (void)::setenv("FAKE_CUDA_DEVICES", "2", 1);
  start_broker();
  auto survivor = parker(2, "", 0);
  auto late = parker(3, "", 1);
  (void)::unsetenv("FAKE_CUDA_DEVICES");
  late.hold();
  lose_broker();
  EXPECT_EQ(answer_when_back(survivor), "intact");
  EXPECT_EQ(free_bytes(), all - 10_MiB) << "it may still come";
  late.kill();
  await([&] { return free_bytes() == all - 4_MiB; }, "the dead client's copies to be free");
  expect_intact(survivor);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, a_client_that_damages_the_table_harms_nobody) {
  start_broker();
  auto survivor = parker(3);
  auto vandal = parker(2, "damage");
  EXPECT_EQ(copies()["damaged_bytes"], all - 10_MiB);
  EXPECT_NE(copies()["warning"].get<std::string>().find("3 of their slots are damaged"),
            std::string::npos);
  child newcomer{"parker", {folder_, "1"}};
  EXPECT_EQ(said_by(newcomer), "none");
  EXPECT_NE(log_.find("goes on without host copies"), std::string::npos) << log_;
  expect_intact(survivor);
  vandal.kill();
  await([&] { return free_bytes() == 4_MiB; }, "the dead client's copies to be free");
  expect_intact(survivor);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, the_next_broker_refuses_a_damaged_table_and_keeps_the_clients) {
  start_broker();
  auto survivor = parker(3);
  auto vandal = parker(2, "damage");
  lose_broker();
  EXPECT_EQ(answer_when_back(survivor), "intact, refused");
  EXPECT_EQ(answer_when_back(vandal), "intact, refused");
  EXPECT_NE(log_.find("does not begin as one"), std::string::npos) << log_;
  EXPECT_EQ(status()["clients"].size(), 2U);
  EXPECT_TRUE(copies().is_null());
  EXPECT_EQ(vandal.stop(), 0);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, the_next_broker_refuses_a_table_without_its_pools) {
  start_broker();
  auto survivor = parker(3, "places");
  lose_broker();
  EXPECT_EQ(answer_when_back(survivor), "intact, refused");
  EXPECT_NE(log_.find("no place of its pool"), std::string::npos) << log_;
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, of_two_tables_the_next_broker_keeps_the_first) {
  start_broker();
  auto survivor = parker(3);
  auto other = parker(2, "exchange");
  other.hold();
  lose_broker();
  EXPECT_EQ(answer_when_back(survivor), "intact");
  ASSERT_EQ(::kill(other.pid(), SIGCONT), 0);
  EXPECT_EQ(answer_when_back(other), "intact, refused");
  EXPECT_NE(log_.find("not those that this broker keeps"), std::string::npos) << log_;
  expect_intact(survivor);
  EXPECT_EQ(copies()["bytes"], all);
  EXPECT_EQ(other.stop(), 0);
  expect_intact(survivor);
  EXPECT_EQ(survivor.stop(), 0);
}

TEST_F(host_copies_process_test, a_client_killed_while_it_takes_and_frees_leaves_nothing_behind) {
  start_broker();
  std::array<child, 2> survivors;
  for (auto& each : survivors) {
    each = child{"taker", {folder_}};
    ASSERT_EQ(said_by(each), "joined");
  }
  for (int i = 0; i < kills_ / 2 && !HasFailure(); ++i) {
    child victim{"taker", {folder_}};
    ASSERT_EQ(said_by(victim), "joined");
    some_time(std::chrono::milliseconds{5});
    if (i % 10 == 9) {
      auto const broker = kill_broker();
      ASSERT_GT(broker, 0);
      broker_.reset();
      victim.kill();
      await_another_broker(broker);
    } else {
      victim.kill();
    }
    await_clients(survivors.size());
    // Both stand still while they are counted.
    std::uint64_t slots = 0;
    for (auto& each : survivors) {
      slots += taken_by(each);
    }
    auto const now = copies();
    EXPECT_EQ(now["held_bytes"].get<std::uint64_t>() + now["kept_bytes"].get<std::uint64_t>(),
              slots * 2_MiB);
    EXPECT_EQ(now["free_bytes"], all - slots * 2_MiB);
    for (auto const& each : survivors) {
      ASSERT_EQ(::kill(each.pid(), SIGUSR1), 0);
    }
  }
  for (auto& each : survivors) {
    EXPECT_EQ(each.stop(), 0);
  }
  await([&] { return status()["clients"].empty(); }, "the takers to be gone");
  EXPECT_EQ(free_bytes(), all);
}

}  // namespace
}  // namespace sluice::test
