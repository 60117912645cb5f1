/// Every system call and every driver call on the path of a handover fails once in turn: the ledger
/// stays exact, nothing leaks, the failure has a kind and a sentence, and the next attempt
/// succeeds. A walk over the calls of one function ends with a run in which none was left to fail.

#include <cuda.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/membership.hpp"
#include "tests/memhandover/random_runs.hpp"
#include "tests/runtime/step/fault_world.hpp"
#include "tests/runtime/step/injected_calls.hpp"
#include "tests/runtime/step/process_roles.hpp"
#include "tests/runtime/step/walk.hpp"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

struct test_name {
  template <typename T>
  std::string operator()(testing::TestParamInfo<T> const& info) const {
    return testing::PrintToString(info.param);
  }
};

/// After a life with a fault: nothing is lost, and a life without one goes well.
void expect_intact(fault_world& world, outcome const& faulty, holdings const& before,
                   std::string const& where) {
  EXPECT_EQ(faulty.problem, "") << where << " " << faulty.error;
  EXPECT_EQ(world.resolve(), "") << where;
  auto const after = world.count();
  EXPECT_EQ(after, before) << where << ": " << to_string(after) << " instead of "
                           << to_string(before) << "; error: " << faulty.error;
  auto const next = world.live();
  EXPECT_TRUE(next.went_well) << where << ", next attempt: " << next.problem << next.error;
  EXPECT_EQ(world.resolve(), "") << where << ", next attempt";
}

/// A life that goes well, and what is there afterwards.
holdings first_life(fault_world& world) {
  world.start_broker();
  auto const life = world.live();
  EXPECT_TRUE(life.went_well) << life.problem << life.error;
  EXPECT_EQ(world.resolve(), "");
  return world.count();
}

class calls_of_clients : public testing::TestWithParam<injected_call> {};

TEST_P(calls_of_clients, fail_one_after_the_other_and_nothing_is_lost) {
  fault_world world{"host"};
  auto const before = first_life(world);
  auto const [name, error_number] = GetParam();
  walk at;
  for (; at.goes_on(); at.step()) {
    auto const which = at.place() + 1;
    fail_call(name, which, error_number);
    auto const life = world.live();
    bool const hit = call_failed();
    fail_no_call();
    expect_intact(world, life, before, std::string{name} + " " + std::to_string(which));
    if (!hit) {
      break;
    }
  }
  RecordProperty("failed_calls", std::to_string(at.steps()));
  std::printf("%s failed in %u places\n", name, at.steps());
}

INSTANTIATE_TEST_SUITE_P(host, calls_of_clients,
                         testing::ValuesIn(injected_calls().begin(), injected_calls().end()),
                         test_name{});

class calls_of_the_broker : public testing::TestWithParam<injected_call> {};

TEST_P(calls_of_the_broker, fail_one_after_the_other_and_nothing_is_lost) {
  auto const [name, error_number] = GetParam();
  walk at;
  for (; at.goes_on(); at.step()) {
    auto const which = at.place() + 1;
    fault_world world{"host"};
    auto const sign = world.folder() + "/failed";
    auto const setting = std::string{name} + ":" + std::to_string(which) + ":" +
                         std::to_string(error_number) + ":" + sign;
    auto const where = setting + " of the broker";
    ::setenv("SLUICE_TEST_FAIL_CALL", setting.c_str(), 1);
    try {
      world.start_broker();
    } catch (error const& why) {
      EXPECT_TRUE(fs::exists(sign)) << where << " " << why.what();
    }
    ::unsetenv("SLUICE_TEST_FAIL_CALL");
    world.start_broker();
    // The call may be one of the second life. One life meets the broker that failed, while it ends at the latest.
    int failed = 0;
    for (bool over = false; !over && !HasFailure();) {
      bool const hit = fs::exists(sign);
      auto const life = world.live_in_child();
      failed += life.went_well ? 0 : 1;
      EXPECT_EQ(life.problem, "") << where << " " << life.error;
      EXPECT_TRUE(life.went_well || (failed == 1 && fs::exists(sign)))
          << where << " " << life.error;
      world.start_broker();
      EXPECT_EQ(world.resolve(), "") << where;
      over = life.went_well && (hit || !fs::exists(sign));
    }
    if (!fs::exists(sign)) {
      break;
    }
  }
  std::printf("%s failed in %u places of the broker\n", name, at.steps());
}

INSTANTIATE_TEST_SUITE_P(host, calls_of_the_broker,
                         testing::ValuesIn(injected_calls().begin(), injected_calls().end()),
                         test_name{});

/// Whether the child has stopped itself; otherwise it has gone on until it was the writer.
bool stops(child const& server, fault_world const& world) {
  for (;;) {
    int state = 0;
    if (::waitpid(server.pid(), &state, WUNTRACED | WNOHANG) == server.pid()) {
      EXPECT_TRUE(WIFSTOPPED(state)) << "the server has ended";
      return WIFSTOPPED(state);
    }
    if (memhandover::query_status(world.folder())["pool"]["writer"] == "server") {
      return false;
    }
    ::poll(nullptr, 0, 1);
  }
}

/// A job gets memory, and what it had is free when it has been killed.
void expect_training_served(fault_world const& world, std::string const& where) {
  child job{"trainer", {world.folder(), "600000", "0"}};
  EXPECT_EQ(job.line(), "joined") << where;
  EXPECT_EQ(job.line(), "committed") << where;
  job.kill();
  auto const deadline = std::chrono::steady_clock::now() + std::chrono::seconds{10};
  while (memhandover::query_status(world.folder())["pool"]["training_bytes"] > 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the job's memory is lost, " << where;
    ::poll(nullptr, 0, 1);
  }
}

TEST(a_client_that_lost_its_broker, looks_again_after_it_had_no_descriptor_to_look_with) {
  fault_world world{"host"};
  world.start_broker();
  memhandover::membership client{world.broker(), memhandover::client_kind::training, "job", ""};
  world.end_broker();
  EXPECT_FALSE(client.receive());
  fail_call("eventfd", 1, EMFILE);
  EXPECT_FALSE(client.reconnect());
  EXPECT_TRUE(call_failed());
  fail_no_call();
  EXPECT_TRUE(client.patience()) << "no attempt is under way";
  while (!client.reconnect()) {
    pollfd news{client.news(), POLLIN, 0};
    auto const patience = client.patience().value_or(std::chrono::minutes{1});
    ASSERT_TRUE(::poll(&news, 1, static_cast<int>(patience.count())) == 1 || client.patience())
        << "no end of the search";
  }
  EXPECT_TRUE(client.has_broker());
}

TEST(a_server_that_starts, stops_before_each_mapping_and_nobody_waits_for_it) {
  fault_world world{"host"};
  world.start_broker();
  unsigned stopped_in_pool = 0;
  for (unsigned which = 1; which < walk::too_many && !testing::Test::HasFailure(); ++which) {
    ::setenv("SLUICE_TEST_FAIL_CALL", ("mmap:" + std::to_string(which) + ":0:").c_str(), 1);
    child server{"server", {world.folder(), "1200000"}};
    ::unsetenv("SLUICE_TEST_FAIL_CALL");
    if (!stops(server, world)) {
      break;
    }
    if (!memhandover::query_status(world.folder())["clients"].empty()) {
      ++stopped_in_pool;
      expect_training_served(world, "stopped in mapping " + std::to_string(which));
    }
    server.kill();
    EXPECT_EQ(world.resolve(), "");
  }
  EXPECT_GT(stopped_in_pool, 3U);
  std::printf("a server stopped in %u places\n", stopped_in_pool);
}

class calls_of_the_driver : public testing::TestWithParam<injected_call> {};

TEST_P(calls_of_the_driver, fail_one_after_the_other_and_nothing_is_lost) {
  fault_world world{"cuda"};
  auto const before = first_life(world);
  auto const [name, code] = GetParam();
  walk at;
  for (; at.goes_on(); at.step()) {
    auto const skip = at.place();
    auto const failures = driver_failures(name);
    fail_driver_call(name, code, skip);
    auto const life = world.live();
    bool const hit = driver_failures(name) > failures;
    fail_driver_call(name, 0, 0);
    expect_intact(world, life, before, std::string{name} + " " + std::to_string(skip + 1));
    if (!hit) {
      break;
    }
  }
  std::printf("%s failed in %u places\n", name, at.steps());
}

INSTANTIATE_TEST_SUITE_P(
    cuda, calls_of_the_driver,
    testing::Values(injected_call{"cuInit", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuDeviceGet", CUDA_ERROR_INVALID_DEVICE},
                    injected_call{"cuDevicePrimaryCtxRetain", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuCtxGetCurrent", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuCtxSetCurrent", CUDA_ERROR_INVALID_CONTEXT},
                    injected_call{"cuStreamCreateWithPriority", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuMemImportFromShareableHandle", CUDA_ERROR_OPERATING_SYSTEM},
                    injected_call{"cuMemAddressReserve", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuMemMap", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuMemSetAccess", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuMemUnmap", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuMemsetD8Async", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuStreamSynchronize", CUDA_ERROR_UNKNOWN}),
    test_name{});

class calls_that_create_chunks : public testing::TestWithParam<injected_call> {};

TEST_P(calls_that_create_chunks, fail_one_after_the_other_and_the_next_pool_is_whole) {
  auto const [name, code] = GetParam();
  walk at;
  for (; at.goes_on(); at.step()) {
    auto const skip = at.place();
    fault_world world{"cuda"};
    auto const setting =
        std::string{name} + ":" + std::to_string(code) + ":" + std::to_string(skip);
    ::setenv("FAKE_CUDA_FAIL", setting.c_str(), 1);
    std::string refused;
    try {
      world.start_broker();
    } catch (error const& why) {
      refused = why.what();
    }
    ::unsetenv("FAKE_CUDA_FAIL");
    if (refused.empty()) {
      break;
    }
    EXPECT_NE(refused.find(' '), std::string::npos) << setting << ": " << refused;
    world.start_broker();
    auto const next = world.live();
    EXPECT_TRUE(next.went_well) << setting << ", next attempt: " << next.problem << next.error;
    EXPECT_EQ(world.resolve(), "") << setting;
  }
  EXPECT_GT(at.steps(), 0U) << "the broker does not call it";
  std::printf("%s failed in %u places of the broker\n", name, at.steps());
}

INSTANTIATE_TEST_SUITE_P(
    cuda, calls_that_create_chunks,
    testing::Values(injected_call{"cuInit", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuDeviceGet", CUDA_ERROR_INVALID_DEVICE},
                    injected_call{"cuDevicePrimaryCtxRetain", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuCtxSetCurrent", CUDA_ERROR_INVALID_CONTEXT},
                    injected_call{"cuMemGetAllocationGranularity", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuMemGetInfo_v2", CUDA_ERROR_UNKNOWN},
                    injected_call{"cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY},
                    injected_call{"cuMemExportToShareableHandle", CUDA_ERROR_OPERATING_SYSTEM}),
    test_name{});

}  // namespace
}  // namespace sluice::test

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::off);
  sluice::test::load_fake_driver();
  if (int const code = sluice::test::run_role(argc, argv); code >= 0) {
    return code;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
