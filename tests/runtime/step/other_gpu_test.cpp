/// Processes that see different GPUs under one number do not share a pool.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

class other_gpu_test : public testing::Test {
 protected:
  void SetUp() override { see(nullptr); }
  void TearDown() override { see(nullptr); }

  static void see(char const* gpus) {
    (void)(gpus == nullptr ? ::unsetenv("CUDA_VISIBLE_DEVICES")
                           : ::setenv("CUDA_VISIBLE_DEVICES", gpus, 1));
  }
};

TEST_F(other_gpu_test, a_server_or_job_that_sees_another_gpu_under_the_pools_number_is_told) {
  fault_world world{"cuda"};
  world.start_broker();
  see("1,0");
  std::optional<error> refused;
  try {
    (void)world.join_server();
  } catch (error const& why) {
    refused = why;
  }
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind(), error_kind::invalid_argument);
  EXPECT_THAT(refused->what(), testing::HasSubstr("CUDA_VISIBLE_DEVICES is 1,0"));
  EXPECT_THROW((void)step::training_memory{world.job()}, error);
  see("0");
  EXPECT_NO_THROW((void)world.join_server());
}

TEST_F(other_gpu_test, the_status_names_the_gpu_as_the_driver_does) {
  fault_world world{"cuda"};
  world.start_broker();
  // The fake driver's UUIDs are text: fake-0.
  EXPECT_EQ(memhandover::query_status(world.folder())["pool"]["gpu"],
            "GPU-66616b65-2d30-0000-0000-000000000000");
}

}  // namespace
}  // namespace sluice::test
