#include "memhandover/allocation/range_allocator.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace sluice::memhandover {
namespace {

TEST(range_allocator, has_nothing_before_it_grows) {
  range_allocator ranges{64};
  EXPECT_FALSE(ranges.allocate(1));
  EXPECT_EQ(ranges.shortage(100), 128U);
}

TEST(range_allocator, counts_the_free_end_when_it_says_what_is_missing) {
  range_allocator ranges{64};
  ranges.grow(1024);
  ASSERT_EQ(ranges.allocate(512), 0U);
  EXPECT_EQ(ranges.shortage(512), 0U);
  EXPECT_EQ(ranges.shortage(1024), 512U);
}

TEST(range_allocator, merges_neighbours_so_that_all_of_it_can_be_had_again) {
  range_allocator ranges{64};
  ranges.grow(4096);
  std::vector<std::size_t> offsets;
  for (int i = 0; i < 64; ++i) {
    offsets.push_back(ranges.allocate(64).value());
  }
  for (std::size_t i = 0; i < offsets.size(); i += 2) {
    EXPECT_EQ(ranges.free(offsets[i]), 64U);
  }
  EXPECT_FALSE(ranges.allocate(128));
  for (std::size_t i = 1; i < offsets.size(); i += 2) {
    EXPECT_EQ(ranges.free(offsets[i]), 64U);
  }
  EXPECT_EQ(ranges.allocate(4096), 0U);
}

TEST(range_allocator, says_zero_for_an_offset_that_is_no_allocation) {
  range_allocator ranges{64};
  ranges.grow(1024);
  EXPECT_EQ(ranges.free(0), 0U);
  auto const offset = ranges.allocate(256).value();
  EXPECT_EQ(ranges.free(offset + 64), 0U);
  EXPECT_EQ(ranges.free(offset), 256U);
  EXPECT_EQ(ranges.free(offset), 0U);
}

TEST(range_allocator, finds_the_allocation_that_an_address_lies_in) {
  range_allocator ranges{64};
  ranges.grow(1024);
  auto const first = ranges.allocate(128).value();
  auto const second = ranges.allocate(128).value();
  EXPECT_EQ(ranges.containing(second + 100), (std::pair<std::size_t, std::size_t>{second, 128}));
  ranges.free(first);
  EXPECT_FALSE(ranges.containing(first));
}

/// The plainest model there is: a byte for each 64, marked by the allocation that has it.
TEST(range_allocator, agrees_with_a_plain_model_over_random_operations) {
  for (std::uint32_t seed : {1U, 2U, 3U}) {
    std::mt19937 random{seed};
    range_allocator ranges{64};
    std::vector<int> cells;
    std::map<std::size_t, std::pair<std::size_t, int>> live;
    int next = 1;
    for (int i = 0; i < 30'000; ++i) {
      switch (random() % 6) {
        case 0: {
          auto const bytes = 64 * (random() % 40);
          ranges.grow(bytes);
          cells.resize(cells.size() + bytes / 64);
          break;
        }
        case 1: {
          auto const end = ranges.free_at_end();
          std::size_t plain = 0;
          while (plain < cells.size() && cells[cells.size() - 1 - plain] == 0) {
            ++plain;
          }
          ASSERT_EQ(end, plain * 64);
          auto const bytes = end == 0 ? 0 : 64 * (random() % (end / 64 + 1));
          ranges.shrink(bytes);
          cells.resize(cells.size() - bytes / 64);
          break;
        }
        case 2:
        case 3: {
          auto const bytes = 1 + random() % 2000;
          auto const offset = ranges.allocate(bytes);
          if (offset) {
            auto const count = (bytes + 63) / 64;
            ASSERT_LE(*offset / 64 + count, cells.size());
            for (std::size_t c = 0; c < count; ++c) {
              ASSERT_EQ(cells[*offset / 64 + c], 0);
              cells[*offset / 64 + c] = next;
            }
            live[*offset] = {count, next++};
          } else {
            ASSERT_GT(ranges.shortage(bytes), 0U);
          }
          break;
        }
        default: {
          if (live.empty()) {
            break;
          }
          auto victim = live.begin();
          std::advance(victim, static_cast<std::ptrdiff_t>(random() % live.size()));
          ASSERT_EQ(ranges.free(victim->first), victim->second.first * 64);
          for (std::size_t c = 0; c < victim->second.first; ++c) {
            cells[victim->first / 64 + c] = 0;
          }
          live.erase(victim);
        }
      }
      ASSERT_EQ(ranges.capacity(), cells.size() * 64);
      ASSERT_EQ(ranges.live(), live.size());
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
