#include "scheduler/reserve.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

constexpr std::uint64_t chunk = 64;
constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

TEST(reserve, refills_to_twice_its_size_once_below_it) {
  reserve keeper{chunk};
  EXPECT_EQ(keeper.update({.free_bytes = 640, .size_bytes = 640}).reclaim_bytes, 0U);
  auto const move = keeper.update({.free_bytes = 576, .size_bytes = 640});
  EXPECT_EQ(move.reclaim_bytes, 1280U - 576U);
  EXPECT_EQ(move.keep_bytes, 1280U);
  EXPECT_TRUE(move.refilling);
}

TEST(reserve, goes_on_refilling_until_full_and_then_rests_down_to_its_size) {
  reserve keeper{chunk};
  (void)keeper.update({.free_bytes = 0, .size_bytes = 640});
  EXPECT_EQ(keeper.update({.free_bytes = 1024, .size_bytes = 640}).reclaim_bytes, 256U);
  EXPECT_EQ(keeper.update({.free_bytes = 1280, .size_bytes = 640}).reclaim_bytes, 0U);
  for (std::uint64_t free : {1216U, 900U, 640U}) {
    auto const move = keeper.update({.free_bytes = free, .size_bytes = 640});
    EXPECT_EQ(move.reclaim_bytes, 0U) << free;
    EXPECT_EQ(move.release_bytes, 0U) << free;
    EXPECT_EQ(move.keep_bytes, free);
  }
  EXPECT_GT(keeper.update({.free_bytes = 639, .size_bytes = 640}).reclaim_bytes, 0U);
}

TEST(reserve, releases_what_exceeds_twice_its_size) {
  reserve keeper{chunk};
  auto const move = keeper.update({.free_bytes = 2000, .size_bytes = 640});
  EXPECT_EQ(move.release_bytes, 704U);  // whole chunks of the 720 beyond
  EXPECT_EQ(move.keep_bytes, 2000U - 704U);
  EXPECT_FALSE(move.refilling);
}

TEST(reserve, of_size_zero_gives_everything_away) {
  reserve keeper{chunk};
  EXPECT_EQ(keeper.update({.free_bytes = 640, .size_bytes = 0}).release_bytes, 640U);
  EXPECT_EQ(keeper.update({.free_bytes = 0, .size_bytes = 0}).reclaim_bytes, 0U);
}

TEST(reserve, moves_in_one_direction_and_in_whole_chunks) {
  reserve keeper{chunk};
  for (std::uint64_t size = 0; size < 700; size += 37) {
    for (std::uint64_t free = 0; free < 2000; free += 41) {
      auto const move = keeper.update({.free_bytes = free, .size_bytes = size});
      EXPECT_TRUE(move.reclaim_bytes == 0 || move.release_bytes == 0);
      EXPECT_EQ(move.reclaim_bytes % chunk, 0U);
      EXPECT_EQ(move.release_bytes % chunk, 0U);
      EXPECT_EQ(move.keep_bytes, free + move.reclaim_bytes - move.release_bytes);
      EXPECT_GE(move.keep_bytes, size);
    }
  }
}

TEST(reserve, resolves_after_one_move) {
  reserve keeper{chunk};
  for (std::uint64_t free : {0U, 100U, 5000U}) {
    auto const first = keeper.update({.free_bytes = free, .size_bytes = 640});
    auto const second = keeper.update({.free_bytes = first.keep_bytes, .size_bytes = 640});
    EXPECT_EQ(second.reclaim_bytes + second.release_bytes, 0U) << free;
  }
}

TEST(reserve, withstands_extreme_sizes) {
  reserve keeper{chunk};
  auto const move = keeper.update({.free_bytes = 0, .size_bytes = most});
  EXPECT_EQ(move.release_bytes, 0U);
  EXPECT_EQ(move.reclaim_bytes % chunk, 0U);
  EXPECT_EQ(keeper.update({.free_bytes = most, .size_bytes = 0}).reclaim_bytes, 0U);
  EXPECT_THROW(reserve{0}, std::invalid_argument);
}

TEST(reserve_size, is_the_largest_model_likely_to_start) {
  std::array const models{cold_model{.bytes = 1000, .loads_per_s = 0.002},
                          cold_model{.bytes = 9000, .loads_per_s = 1e-5},
                          cold_model{.bytes = 400, .loads_per_s = 0.01}};
  EXPECT_EQ(reserve_size(models, most), 1000U);
  EXPECT_EQ(reserve_size(models, 600), 600U);
  EXPECT_EQ(reserve_size({}, most), 0U);
}

TEST(reserve_size, covers_models_that_start_together_but_each_only_once) {
  std::array const models{cold_model{.bytes = 1000, .loads_per_s = 0.5},
                          cold_model{.bytes = 600, .loads_per_s = 9.0}};
  EXPECT_EQ(reserve_size(models, most), 1600U);
}

}  // namespace
}  // namespace sluice::scheduler
