/// Host copies where system calls fail: the broker and its clients go on without them, and say so.

#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "tests/memhandover/disk_folder.hpp"
#include "tests/runtime/step/fault_world.hpp"
#include "tests/runtime/step/injected_calls.hpp"
#include "tests/runtime/step/walk.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using memhandover::client_kind;
using memhandover::tenant_client;

constexpr std::uint64_t copies_bytes = 8_MiB;

memhandover::broker_options with_copies(fault_world const& world) {
  auto wanted = world.broker();
  wanted.host_copy_bytes = copies_bytes;
  return wanted;
}

std::unique_ptr<tenant_client> join(fault_world const& world) {
  return tenant_client::join(
      world.broker(), client_kind::training, "parker",
      [](memhandover::demand const& /*what*/) { return memhandover::demand_answer{}; });
}

class calls_for_host_copies : public testing::TestWithParam<injected_call> {};

TEST_P(calls_for_host_copies, of_the_broker_fail_in_turn_and_it_goes_on_without_or_says_why_not) {
  auto const [name, error_number] = GetParam();
  unsigned without = 0;
  walk at;
  for (; at.goes_on(); at.step()) {
    fault_world world{"cuda"};
    auto const sign = world.folder() + "/failed";
    auto const where = std::string{name} + ":" + std::to_string(at.place() + 1) + ":" +
                       std::to_string(error_number) + ":" + sign;
    ::setenv("SLUICE_TEST_FAIL_CALL", where.c_str(), 1);
    memhandover::unique_fd kept;
    std::string refused;
    try {
      kept = memhandover::ensure_broker(with_copies(world));
    } catch (error const& why) {
      refused = why.what();
    }
    ::unsetenv("SLUICE_TEST_FAIL_CALL");
    if (!refused.empty()) {
      EXPECT_TRUE(std::filesystem::exists(sign)) << where << " " << refused;
      continue;
    }
    auto const copies = memhandover::query_status(world.folder())["pool"]["host_copies"];
    bool const has = copies["bytes"] == copies_bytes;
    EXPECT_TRUE(has || copies["warning"].is_string()) << where << " " << copies.dump();
    without += has ? 0 : 1;
    try {
      EXPECT_EQ(join(world)->copies() != nullptr, has) << where;
    } catch (error const& why) {
      // The call was one of the conversation.
      EXPECT_TRUE(std::filesystem::exists(sign)) << where << " " << why.what();
    }
    if (!std::filesystem::exists(sign)) {
      EXPECT_TRUE(has) << where;
      break;
    }
  }
  EXPECT_TRUE(without > 0 || !at.is_whole()) << "none of these calls made host copies";
}

INSTANTIATE_TEST_SUITE_P(broker, calls_for_host_copies,
                         testing::Values(injected_call{"memfd_create", EMFILE},
                                         injected_call{"ftruncate", EFBIG},
                                         injected_call{"mmap", ENOMEM}),
                         [](auto const& of) { return std::string{of.param.name}; });

TEST(a_broker_with_host_copies_on_disk, says_why_there_can_be_none_and_leaves_nothing_there) {
  disk_folder const disk;
  if (disk.path().empty()) {
    GTEST_SKIP() << "there is no folder on a disk";
  }
  for (auto const& [error_number, said] :
       {std::pair{ENOSPC, "make room on that file system"},
        std::pair{EOPNOTSUPP, "cannot keep blocks for a file"}, std::pair{EINTR, ""}}) {
    fault_world world{"cuda"};
    auto wanted = with_copies(world);
    wanted.host_copy_disk = {disk.path(), copies_bytes};
    auto const sign = world.folder() + "/failed";
    ::setenv("SLUICE_TEST_FAIL_CALL",
             ("fallocate:1:" + std::to_string(error_number) + ":" + sign).c_str(), 1);
    std::string refused;
    memhandover::unique_fd kept;
    try {
      kept = memhandover::ensure_broker(wanted);
    } catch (error const& why) {
      refused = why.what();
    }
    ::unsetenv("SLUICE_TEST_FAIL_CALL");
    EXPECT_TRUE(std::filesystem::exists(sign)) << "its blocks are asked for first";
    EXPECT_EQ(refused.empty(), *said == '\0') << refused;
    EXPECT_NE(refused.find(said), std::string::npos) << refused;
    EXPECT_TRUE(disk.is_empty());
    if (kept) {
      EXPECT_NE(join(world)->copies()->disk(), nullptr);
    }
  }
}

TEST(a_client_with_host_copies, joins_without_them_where_they_cannot_be_mapped) {
  fault_world world{"cuda"};
  auto const kept = memhandover::ensure_broker(with_copies(world));
  unsigned without = 0;
  walk at;
  for (; at.goes_on(); at.step()) {
    auto const mapped = mapped_bytes();
    fail_call("mmap", at.place() + 1, ENOMEM);
    bool hit = false;
    try {
      auto const job = join(world);
      hit = call_failed();
      fail_no_call();
      EXPECT_EQ(job->copies() == nullptr, hit) << at.place();
      without += hit ? 1 : 0;
    } catch (error const& why) {
      hit = call_failed();
      fail_no_call();
      EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
    }
    EXPECT_EQ(mapped_bytes(), mapped);
    if (!hit) {
      break;
    }
  }
  EXPECT_TRUE(at.is_whole() ? without == 2 : without <= 2)
      << without << ", for one of the table, and one of the bytes";
}

TEST(a_job_with_host_copies, has_pinned_them_and_leaves_none_pinned) {
  fault_world world{"cuda"};
  auto const kept = memhandover::ensure_broker(with_copies(world));
  auto const pinned = [] { return driver_calls("cuMemHostRegister_v2"); };
  auto const unpinned = [] { return driver_calls("cuMemHostUnregister"); };
  auto const before = pinned();
  auto const before_unpinned = unpinned();
  {
    idle_gate gate;
    auto options = world.job();
    options.gate = &gate;
    step::training_memory job{options};
    auto const deadline = std::chrono::steady_clock::now() + std::chrono::seconds{30};
    while (pinned() == before) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "nothing is pinned";
      ::poll(nullptr, 0, 1);
    }
  }
  EXPECT_EQ(unpinned() - before_unpinned, pinned() - before);
}

}  // namespace
}  // namespace sluice::test
