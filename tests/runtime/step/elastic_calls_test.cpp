/// The C boundary of an engine's memory: statuses and sentences, and a child that was forked.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "abi/elastic_api.h"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using testing::HasSubstr;

using owned = std::unique_ptr<sluice_elastic, decltype(&sluice_elastic_leave)>;

class elastic_calls_test : public testing::Test {
 protected:
  void SetUp() override {
    world_.start_broker();
    ::setenv("SLUICE_RUNTIME_DIR", world_.folder().c_str(), 1);
    presence_ = memhandover::open_pool(world_.broker());
  }
  void TearDown() override { ::unsetenv("SLUICE_RUNTIME_DIR"); }

  [[nodiscard]] static owned join() {
    return {sluice_elastic_join("vllm", SLUICE_ELASTIC_HOST), sluice_elastic_leave};
  }

  fault_world world_{"host"};  // 24 chunks
  memhandover::pool_presence presence_;
};

TEST_F(elastic_calls_test, a_range_is_backed_chunk_by_chunk) {
  auto const space = join();
  ASSERT_NE(space, nullptr) << sluice_last_error();
  EXPECT_EQ(sluice_elastic_pool_chunks(space.get()), 24U);
  ASSERT_EQ(sluice_elastic_reserve(space.get(), 4), SLUICE_OK) << sluice_last_error();
  std::uint32_t const chunks[]{1, 3};
  ASSERT_EQ(sluice_elastic_back(space.get(), chunks, 2, 1000), SLUICE_OK) << sluice_last_error();
  auto* const third = static_cast<unsigned char*>(sluice_elastic_base(space.get())) +
                      3 * sluice_elastic_chunk_bytes(space.get());
  EXPECT_EQ(*third, 0);
  *third = 1;
  ASSERT_EQ(sluice_elastic_answer(space.get(), 1), SLUICE_OK);
  EXPECT_EQ(sluice_elastic_demanded(space.get()), 0U);
  EXPECT_EQ(sluice_elastic_await_demand(space.get(), 0), 0U);
  sluice_elastic_rouse(space.get());
  EXPECT_EQ(sluice_elastic_await_demand(space.get(), 60'000), 0U);
  sluice_elastic_refuse_rest(space.get());
  EXPECT_EQ(sluice_elastic_give_back(space.get(), chunks, 2), SLUICE_OK);
}

TEST_F(elastic_calls_test, what_is_wrong_is_said) {
  auto const space = join();
  ASSERT_NE(space, nullptr) << sluice_last_error();
  EXPECT_EQ(sluice_elastic_reserve(space.get(), 25), SLUICE_FAILED);
  EXPECT_THAT(sluice_last_error(), HasSubstr("1 to 24"));
  ASSERT_EQ(sluice_elastic_reserve(space.get(), 24), SLUICE_OK);
  std::uint32_t const chunks[]{24};
  EXPECT_EQ(sluice_elastic_give_back(space.get(), chunks, 1), SLUICE_FAILED);
  EXPECT_THAT(sluice_last_error(), HasSubstr("place 24 of a space of 24 does not exist"));
}

TEST_F(elastic_calls_test, what_the_pool_does_not_grant_is_a_shortage) {
  auto const first = join();
  auto const second = join();
  ASSERT_EQ(sluice_elastic_reserve(first.get(), 24), SLUICE_OK);
  ASSERT_EQ(sluice_elastic_reserve(second.get(), 24), SLUICE_OK);
  std::uint32_t chunks[24];
  for (std::uint32_t i = 0; i < 24; ++i) {
    chunks[i] = i;
  }
  ASSERT_EQ(sluice_elastic_back(first.get(), chunks, 23, 1000), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(sluice_elastic_back(second.get(), chunks, 2, 0), SLUICE_OUT_OF_MEMORY);
  EXPECT_THAT(sluice_last_error(), HasSubstr("does not grant 2 more chunks"));
}

TEST_F(elastic_calls_test, without_a_broker_it_does_not_join) {
  presence_ = {};
  world_.end_broker();
  ::setenv("SLUICE_BROKER", "/nowhere/sluice", 1);
  EXPECT_EQ(join(), nullptr);
  EXPECT_THAT(sluice_last_error(), HasSubstr("/nowhere/sluice"));
}

TEST_F(elastic_calls_test, a_forked_child_has_none_of_it) {
  auto const space = join();
  ASSERT_EQ(sluice_elastic_reserve(space.get(), 4), SLUICE_OK) << sluice_last_error();
  auto const child = ::fork();
  if (child == 0) {
    std::uint32_t const chunks[]{0};
    bool const refused = sluice_elastic_back(space.get(), chunks, 1, 0) == SLUICE_FAILED;
    sluice_elastic_leave(space.get());
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::uint32_t const chunks[]{0};
  EXPECT_EQ(sluice_elastic_back(space.get(), chunks, 1, 1000), SLUICE_OK) << sluice_last_error();
}

TEST(elastic_calls_on_a_gpu_test, a_range_is_backed_chunk_by_chunk_and_zero_again) {
  fault_world world{"cuda"};
  world.start_broker();
  ::setenv("SLUICE_RUNTIME_DIR", world.folder().c_str(), 1);
  auto const presence = memhandover::open_pool(world.broker());
  {
    owned const space{sluice_elastic_join("vllm", 0), sluice_elastic_leave};
    ASSERT_NE(space, nullptr) << sluice_last_error();
    ASSERT_EQ(sluice_elastic_reserve(space.get(), 4), SLUICE_OK) << sluice_last_error();
    std::uint32_t const chunks[]{0, 3};
    auto const bytes = sluice_elastic_chunk_bytes(space.get());
    for (int times = 0; times < 3; ++times) {
      ASSERT_EQ(sluice_elastic_back(space.get(), chunks, 2, 1000), SLUICE_OK)
          << sluice_last_error();
      auto* const last =
          static_cast<unsigned char*>(sluice_elastic_base(space.get())) + 4 * bytes - 1;
      EXPECT_EQ(*last, 0);
      *last = 1;
      ASSERT_EQ(sluice_elastic_give_back(space.get(), chunks, 2), SLUICE_OK);
    }
  }
  struct wrong {
    char const* name;
    char const* value;
    char const* words;
  };
  for (auto const& each :
       {wrong{"SLUICE_DEVICE", "1",
              "GPU 1 is to be shared (--device, SLUICE_DEVICE), and this process uses GPU 0; both"},
        wrong{"SLUICE_DEVICE", "first", "SLUICE_DEVICE is \"first\", must be the number of a GPU"},
        wrong{"SLUICE_DEVICE", "-1", "SLUICE_DEVICE is \"-1\", must be the number of a GPU"},
        wrong{"SLUICE_POOL_BYTES", "64MiB", "SLUICE_POOL_BYTES is \"64MiB\", must be a number"}}) {
    ::setenv(each.name, each.value, 1);
    EXPECT_EQ(sluice_elastic_join("vllm", 0), nullptr) << each.value;
    EXPECT_THAT(sluice_last_error(), HasSubstr(each.words));
    ::unsetenv(each.name);
  }
  ::unsetenv("SLUICE_RUNTIME_DIR");
}

}  // namespace
}  // namespace sluice::test
