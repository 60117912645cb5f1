#include "memhandover/ledger/chunk_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace sluice::memhandover {
namespace {

using numbers = std::vector<std::uint32_t>;

std::vector<bool> only(numbers const& free, std::size_t total) {
  std::vector<bool> result(total);
  for (auto const chunk : free) {
    result.at(chunk) = true;
  }
  return result;
}

TEST(chunk_choice, gives_the_lowest_neighbours) {
  EXPECT_EQ(choose_chunks_to_give(numbers{0, 2, 4, 5, 6, 9}, only({}, 10), 2), (numbers{4, 5}));
}

TEST(chunk_choice, gives_what_joins_the_free_ones) {
  EXPECT_EQ(choose_chunks_to_give(numbers{0, 1, 2, 3, 6, 7}, only({4, 5}, 10), 2), (numbers{2, 3}));
  EXPECT_EQ(choose_chunks_to_give(numbers{1, 3, 8, 9}, only({2, 4}, 10), 2), (numbers{1, 3}));
}

TEST(chunk_choice, gives_more_than_is_missing_where_the_free_ones_lie_apart) {
  EXPECT_EQ(choose_chunks_to_give(numbers{4, 5, 6, 7}, only({0, 9}, 10), 1), (numbers{4, 5, 6}));
}

TEST(chunk_choice, gives_the_lowest_where_there_can_be_no_run) {
  EXPECT_EQ(choose_chunks_to_give(numbers{1, 3, 5, 7}, only({9}, 10), 2), (numbers{1, 3}));
}

TEST(chunk_choice, gives_all_where_there_are_too_few) {
  EXPECT_EQ(choose_chunks_to_give(numbers{3, 5}, only({}, 10), 4), (numbers{3, 5}));
  EXPECT_EQ(choose_chunks_to_give(numbers{}, only({}, 10), 4), numbers{});
}

TEST(chunk_choice, nothing_missing_is_nothing_given) {
  EXPECT_EQ(choose_chunks_to_give(numbers{3, 5}, only({7}, 10), 0), numbers{});
}

/// Every window tried one after the other.
numbers plainly(numbers const& own, std::vector<bool> const& free, std::uint32_t missing) {
  auto const length =
      missing + static_cast<std::size_t>(std::count(free.begin(), free.end(), true));
  std::vector<numbers> windows;
  for (std::size_t start = 0; missing > 0 && start + length <= free.size(); ++start) {
    numbers given;
    std::size_t usable = 0;
    for (std::size_t chunk = start; chunk < start + length; ++chunk) {
      if (std::find(own.begin(), own.end(), chunk) != own.end()) {
        given.push_back(static_cast<std::uint32_t>(chunk));
        ++usable;
      } else if (free[chunk]) {
        ++usable;
      }
    }
    if (usable == length) {
      windows.push_back(given);
    }
  }
  auto const best =
      std::min_element(windows.begin(), windows.end(),
                       [](auto const& a, auto const& b) { return a.size() < b.size(); });
  if (best != windows.end()) {
    return *best;
  }
  return {own.begin(), own.begin() + std::min<std::ptrdiff_t>(missing, std::ssize(own))};
}

TEST(chunk_choice, random_pools_agree_with_trying_every_window) {
  std::mt19937 random{7};
  for (int round = 0; round < 20'000; ++round) {
    auto const total = 1 + random() % 24;
    auto const owned = random() % 100;
    auto const others = random() % 40;
    numbers own;
    std::vector<bool> free(total);
    for (std::uint32_t chunk = 0; chunk < total; ++chunk) {
      if (random() % 100 < owned) {
        own.push_back(chunk);
      } else {
        free[chunk] = random() % 100 < others;
      }
    }
    auto const missing = static_cast<std::uint32_t>(random() % (own.size() + 2));
    ASSERT_EQ(choose_chunks_to_give(own, free, missing), plainly(own, free, missing))
        << "round " << round;
  }
}

}  // namespace
}  // namespace sluice::memhandover
