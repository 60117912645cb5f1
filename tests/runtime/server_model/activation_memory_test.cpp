#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/activation_memory.hpp"
#include "tests/runtime/server_model/heap_pool.hpp"

namespace sluice::server {
namespace {

using testing::heap_pool;
using freed = activation_memory::freed;
constexpr std::uint64_t chunk = heap_pool::chunk;

class activations_in_a_pool : public ::testing::Test {
 protected:
  [[nodiscard]] std::uint64_t served() const { return pool_->usage().serving_bytes; }

  std::shared_ptr<heap_pool> pool_ = std::make_shared<heap_pool>(8, 2);
};

TEST_F(activations_in_a_pool, are_the_pools_memory_and_go_back_to_it) {
  activation_memory memory{pool_, freed::given_back};
  auto* const large = memory.allocate(3 * chunk);
  auto* const small = memory.allocate(100);
  std::memset(large, 1, 3 * chunk);
  std::memset(small, 2, 100);
  EXPECT_EQ(std::to_integer<int>(large[3 * chunk - 1]), 1);
  EXPECT_EQ(served(), 4 * chunk);
  EXPECT_TRUE(memory.free(large));
  EXPECT_EQ(served(), chunk);
  EXPECT_TRUE(memory.free(small));
  EXPECT_EQ(served(), 0U);
}

TEST_F(activations_in_a_pool, share_chunks_where_they_are_small) {
  activation_memory memory{pool_, freed::given_back};
  auto* const one = memory.allocate(512);
  auto* const other = memory.allocate(512);
  EXPECT_NE(one, other);
  EXPECT_EQ(served(), chunk);
  EXPECT_TRUE(memory.free(one));
  EXPECT_TRUE(memory.free(other));
}

TEST_F(activations_in_a_pool, take_what_training_has) {
  activation_memory memory{pool_, freed::given_back};
  auto* const all = memory.allocate(8 * chunk);
  EXPECT_EQ(pool_->usage().training_bytes, 0U);
  EXPECT_TRUE(memory.free(all));
}

TEST_F(activations_in_a_pool, are_refused_beyond_it_without_asking_training) {
  activation_memory memory{pool_, freed::given_back};
  try {
    (void)memory.allocate(20ULL << 30U);
    FAIL() << "the pool has so much";
  } catch (error const& refused) {
    EXPECT_EQ(refused.kind(), error_kind::out_of_memory);
    EXPECT_STREQ(refused.what(),
                 "a computation needs 20 GiB at once, but the pool has 32 KiB for inference; make "
                 "pool.memory larger, or the inputs smaller");
  }
  EXPECT_EQ(pool_->usage().training_bytes, 2 * chunk);
  EXPECT_EQ(served(), 0U);
}

TEST_F(activations_in_a_pool, find_an_allocation_by_each_address_within) {
  activation_memory memory{pool_, freed::given_back};
  auto* const at = memory.allocate(chunk + 1);
  for (auto* const inside : {at, at + 1, at + chunk}) {
    auto const found = memory.containing(inside);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->base, at);
    EXPECT_EQ(found->bytes, chunk + 1);
  }
  EXPECT_FALSE(memory.containing(at + chunk + 1));
  EXPECT_FALSE(memory.containing(at - 1));
  EXPECT_FALSE(memory.free(at + 1));
  EXPECT_TRUE(memory.free(at));
  EXPECT_FALSE(memory.free(at));
  EXPECT_FALSE(memory.containing(at));
}

TEST_F(activations_in_a_pool, that_are_kept_serve_the_next_of_that_size) {
  activation_memory memory{pool_, freed::kept};
  auto* const first = memory.allocate(2 * chunk);
  EXPECT_TRUE(memory.free(first));
  EXPECT_EQ(memory.kept_bytes(), 2 * chunk);
  EXPECT_EQ(served(), 2 * chunk);
  auto* const again = memory.allocate(2 * chunk - 100);
  EXPECT_EQ(again, first);
  auto* const small = memory.allocate(512);  // would waste what is kept, if there were any
  EXPECT_TRUE(memory.free(again));
  EXPECT_TRUE(memory.free(small));
  auto* const smaller = memory.allocate(chunk);
  EXPECT_NE(smaller, first);
  EXPECT_TRUE(memory.free(smaller));
  EXPECT_TRUE(memory.give_back());
  EXPECT_FALSE(memory.give_back());
  EXPECT_EQ(memory.kept_bytes(), 0U);
  EXPECT_EQ(served(), 0U);
}

TEST_F(activations_in_a_pool, that_are_kept_go_before_another_is_refused) {
  activation_memory memory{pool_, freed::kept};
  EXPECT_TRUE(memory.free(memory.allocate(5 * chunk)));
  auto* const all = memory.allocate(8 * chunk);
  EXPECT_EQ(memory.kept_bytes(), 0U);
  EXPECT_TRUE(memory.free(all));
}

TEST_F(activations_in_a_pool, of_several_threads_do_not_overlap) {
  auto const pool = std::make_shared<heap_pool>(32, 2);
  auto const memory = std::make_shared<activation_memory>(pool, freed::kept);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int number = 1; number <= 3; ++number) {
    threads.emplace_back([&, number] {
      for (int round = 0; round < 200; ++round) {
        std::uint64_t const bytes = 512 + static_cast<std::uint64_t>(round * 37 % 4000);
        auto* const at = memory->allocate(bytes);
        std::memset(at, number, bytes);
        for (std::uint64_t i = 0; i < bytes; ++i) {
          wrong += std::to_integer<int>(at[i]) == number ? 0 : 1;
        }
        wrong += memory->free(at) ? 0 : 1;
        if (round % 50 == number) {
          memory->give_back();
        }
      }
    });
  }
  for (auto& each : threads) {
    each.join();
  }
  EXPECT_EQ(wrong, 0);
  (void)memory->give_back();
  EXPECT_EQ(pool->usage().serving_bytes, 0U);
}

}  // namespace
}  // namespace sluice::server
