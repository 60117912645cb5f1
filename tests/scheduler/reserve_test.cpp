#include "scheduler/reserve.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

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

/// Of which a free handover brings half of the cold starts into time, and being held all.
cold_model starting(std::uint64_t bytes, double loads_per_s) {
  return {.bytes = bytes, .loads_per_s = loads_per_s, .held_gain = 1.0, .free_gain = 0.5};
}

TEST(reserve_size, is_room_for_a_start_where_few_come_at_once) {
  std::vector<cold_model> models(8, starting(1000, 0.002));
  EXPECT_EQ(reserve_size(models, most), 1000U);
  EXPECT_EQ(reserve_size(models, 999), 0U) << "none of them has room there";
  models.push_back(starting(9000, 1e-5));
  EXPECT_NEAR(static_cast<double>(reserve_size(models, most)), 1000.0, 17'000.0 / 128);
  EXPECT_EQ(reserve_size({}, most), 0U);
}

TEST(reserve_size, is_room_for_those_that_start_together_before_it_is_filled_again) {
  // Many models: a byte that holds one of them brings little.
  std::vector<cold_model> const models(1000, starting(100, 0.002));
  auto const steps = [&](seconds refill) {
    return reserve_size(models, 128 * 100, false, refill) / 100;
  };
  auto const quickly = steps(seconds{0.01}), slowly = steps(seconds{1.0}),
             never = steps(seconds{10.0});
  EXPECT_EQ(quickly, 2U) << "two starts a second, and once in fifty the next one at once";
  EXPECT_GT(slowly, 3U);
  EXPECT_LT(slowly, 12U);
  EXPECT_GT(never, 20U);
  EXPECT_LT(never, 60U);
}

TEST(reserve_size, is_the_best_of_all_sizes_by_enumeration) {
  // Two classes; what starts within a second, counted one by one.
  std::vector<cold_model> models(40, starting(300, 0.004));
  models.insert(models.end(), 20, starting(800, 0.006));
  constexpr double most_bytes = 12'800.0;
  constexpr double step = 100.0;
  double const small = 40 * 0.004, large = 20 * 0.006;
  auto const poisson = [](double mean, int n) {
    return std::exp(-mean + n * std::log(mean) - std::lgamma(n + 1.0));
  };
  auto const fits = [&](double bytes) {
    double sum = 0.0;
    for (int a = 0; a <= 20; ++a) {
      for (int b = 0; b <= 20; ++b) {
        sum += 300.0 * a + 800.0 * b <= bytes ? poisson(small, a) * poisson(large, b) : 0.0;
      }
    }
    return sum;
  };
  // Held to most effect: one start's whole gain for its bytes.
  double const held = std::max(0.004 / 300.0, 0.006 / 800.0);
  double best = 0.0, size = 0.0;
  for (double w = step; w <= most_bytes; w += step) {
    double const gain = 0.5 * small * (w >= 300.0 ? fits(w - 300.0) : 0.0) +
                        0.5 * large * (w >= 800.0 ? fits(w - 800.0) : 0.0) - 1.5 * w * held;
    if (gain > best) {
      best = gain;
      size = w;
    }
  }
  ASSERT_GT(size, 800.0);
  EXPECT_EQ(static_cast<double>(reserve_size(models, 12'800)), size);
}

TEST(reserve_size, is_none_where_holding_a_model_brings_more) {
  std::vector<cold_model> const one{starting(1000, 0.002)};
  EXPECT_EQ(reserve_size(one, most), 0U) << "half of its starts for half more than its bytes";
  std::vector<cold_model> const often(10, starting(600, 9.0));
  EXPECT_EQ(reserve_size(often, most), 0U) << "to hold one of them brings more";
  std::vector<cold_model> many(8, starting(1000, 0.002));
  EXPECT_EQ(reserve_size(many, most), 1000U) << "for whichever comes";
  for (auto& each : many) {
    each.free_gain = 0.001;
  }
  EXPECT_EQ(reserve_size(many, most), 0U) << "a handover is little of their loads";
  for (auto& each : many) {
    each.free_gain = each.held_gain = 0.0;
  }
  EXPECT_EQ(reserve_size(many, most), 0U) << "cold starts are in time, or late, whatever is done";
}

TEST(reserve_size, stays_while_it_is_hardly_worth_less) {
  std::vector<cold_model> models(4, starting(1000, 0.002));
  for (auto& each : models) {  // four starts of that share, against one start for half more bytes
    each.free_gain = 0.36;
  }
  EXPECT_EQ(reserve_size(models, most), 0U);
  EXPECT_EQ(reserve_size(models, most, true), 1000U);
}

TEST(reserve_size, withstands_any_number) {
  constexpr double huge = 1e300;
  for (double const rate : {0.0, 1e-300, 1.0, huge}) {
    for (double const gain : {0.0, 1e-300, 1.0, huge}) {
      std::vector<cold_model> const models{
          {.bytes = most, .loads_per_s = rate, .held_gain = gain, .free_gain = 1.0},
          {.bytes = 1,
           .loads_per_s = rate,
           .released_fraction = 0.0,
           .held_gain = 1.0,
           .free_gain = gain},
          {.bytes = 0, .loads_per_s = rate, .free_gain = gain}};
      EXPECT_LE(reserve_size(models, 12'800), 12'800U);
      EXPECT_LE(reserve_size(models, most), most);
      EXPECT_EQ(reserve_size(models, 0), 0U);
    }
  }
}

}  // namespace
}  // namespace sluice::scheduler
