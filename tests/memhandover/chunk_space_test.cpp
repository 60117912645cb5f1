#include "memhandover/allocation/chunk_space.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/device/host_memory.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

class chunk_space_test : public testing::Test {
 protected:
  pool_shape shape_{backend_kind::host, -1, 64_KiB, 16};
  pool_descriptors chunks_ = create_host_chunks(shape_);
  std::unique_ptr<device_memory> memory_ = open_device_memory(shape_, chunks_);

  static std::vector<std::uint32_t> numbers(std::uint32_t from, std::uint32_t count) {
    std::vector<std::uint32_t> result(count);
    std::iota(result.begin(), result.end(), from);
    return result;
  }
  static std::vector<std::uint32_t> parked_of(chunk_space& space, std::uint32_t first,
                                              std::uint32_t count) {
    std::vector<std::uint32_t> chunks(count);
    space.park(first, chunks);
    return chunks;
  }
};

TEST_F(chunk_space_test, gives_addresses_in_the_chunks_that_were_mapped) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  EXPECT_EQ(space.allocate(100), nullptr);
  EXPECT_EQ(space.chunks_needed(100_KiB), 2U);
  space.grow(numbers(4, 2));
  auto* const address = space.allocate(100_KiB);
  ASSERT_NE(address, nullptr);
  std::memset(address, 7, 100_KiB);
  auto* const other = memory_->reserve(1);
  memory_->map(other, numbers(5, 1));
  EXPECT_EQ(static_cast<int>(other[0]), 7)
      << "the second chunk of the space is chunk 5 of the pool";
  memory_->unmap(other, 1);
  memory_->release(other, 1);
}

TEST_F(chunk_space_test, no_size_is_so_large_that_it_seems_to_fit) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(numbers(0, 2));
  for (std::size_t const bytes : {std::size_t{1} << 48U, std::size_t{1} << 62U,
                                  (std::size_t{1} << 63U) + 5, ~std::size_t{0}, 16 * 64_KiB + 1}) {
    EXPECT_EQ(space.allocate(bytes), nullptr) << bytes;
    EXPECT_GT(space.chunks_needed(bytes), space.room()) << bytes;
  }
}

TEST_F(chunk_space_test, gives_back_only_chunks_in_which_nothing_lives) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(numbers(0, 4));
  auto* const low = space.allocate(64_KiB);
  auto* const high = space.allocate(128_KiB);
  ASSERT_NE(low, nullptr);
  ASSERT_NE(high, nullptr);
  EXPECT_EQ(space.idle_chunks(), 1U);
  EXPECT_EQ(space.free(high), 128_KiB);
  EXPECT_EQ(space.shrink(2), (std::vector<std::uint32_t>{2, 3}));
  EXPECT_EQ(space.shrink(9), (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(space.shrink(9), (std::vector<std::uint32_t>{}));
}

/// Whether a load from `at` would not fault: the kernel tells by EFAULT.
bool readable(std::byte const* at) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  unique_fd const reader{ends[0]};
  unique_fd const writer{ends[1]};
  return ::write(writer.get(), at, 1) == 1;
}

TEST_F(chunk_space_test, moves_with_its_contents_to_addresses_of_somebody_else_and_back) {
  auto* const elsewhere = memory_->reserve(3);
  {
    chunk_space space{*memory_, 3, 64, chunk_space::backing::pool};
    space.grow(numbers(2, 3));
    auto* const home = space.allocate(150_KiB);
    ASSERT_NE(home, nullptr);
    std::memset(home, 7, 150_KiB);
    space.move_to(elsewhere);
    EXPECT_FALSE(readable(home));
    EXPECT_FALSE(space.contains(home));
    EXPECT_TRUE(space.contains(elsewhere + 150_KiB - 1));
    EXPECT_EQ(static_cast<int>(elsewhere[150_KiB - 1]), 7);
    elsewhere[0] = std::byte{9};
    EXPECT_EQ(parked_of(space, 1, 1), numbers(3, 1));
    EXPECT_FALSE(readable(elsewhere + 64_KiB)) << "it is parked where it is";
    space.unpark(1, numbers(9, 1));
    EXPECT_TRUE(readable(elsewhere + 64_KiB));
    space.move_to(nullptr);
    EXPECT_FALSE(readable(elsewhere));
    EXPECT_EQ(static_cast<int>(home[0]), 9);
    space.move_to(elsewhere);
    EXPECT_EQ(space.free(elsewhere), 150_KiB);
    EXPECT_EQ(space.shrink(3).size(), 3U);
  }
  EXPECT_FALSE(readable(elsewhere)) << "it has unmapped where it was last";
  memory_->release(elsewhere, 3);
}

/// Writes as a kernel does that is still running: nothing orders it with the pages' end, on purpose.
void overwrite(std::byte* at, std::size_t bytes, std::byte mark) {
  auto volatile* const bytes_there = at;
  for (std::size_t i = 0; i < bytes; i += 64) {
    bytes_there[i] = mark;
  }
}

TEST_F(chunk_space_test, a_writer_that_goes_on_after_a_revocation_reaches_nobody_else) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(numbers(0, 8));
  auto* const address = space.allocate(8 * 64_KiB);
  ASSERT_NE(address, nullptr);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> rounds{0};
  std::thread writer{[&] {
    while (!stop) {
      overwrite(address, 8 * 64_KiB, static_cast<std::byte>((++rounds & 0xffU) | 1U));
    }
  }};
  while (rounds < 3) {
    std::this_thread::yield();
  }
  std::vector<std::uint32_t> const taken{space.chunks().begin(), space.chunks().end()};
  space.revoke(true);
  EXPECT_TRUE(space.chunks().empty());
  auto* const other = memory_->reserve(8);
  memory_->map(other, taken);
  std::memset(other, 0, 8 * 64_KiB);
  auto const seen = rounds.load();
  while (rounds < seen + 3) {
    std::this_thread::yield();
  }
  for (std::size_t i = 0; i < 8 * 64_KiB; ++i) {
    ASSERT_EQ(static_cast<int>(other[i]), 0) << "at byte " << i;
  }
  stop = true;
  writer.join();
  memory_->sweep();
  memory_->unmap(other, 8);
  memory_->release(other, 8);
}

TEST_F(chunk_space_test, what_is_unmapped_soon_is_out_of_reach_at_once) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(std::array{9U, 4U, 5U});
  auto* const address = space.allocate(3 * 64_KiB);
  ASSERT_NE(address, nullptr);
  std::memset(address, 7, 3 * 64_KiB);
  EXPECT_TRUE(readable(address));
  ASSERT_EQ(space.free(address), 3 * 64_KiB);
  EXPECT_EQ(space.shrink(3, chunk_space::unmapping::soon), (std::vector<std::uint32_t>{9, 4, 5}));
  EXPECT_FALSE(readable(address));
  EXPECT_FALSE(readable(address + 2 * 64_KiB));
  memory_->sweep();
  memory_->sweep();
  auto* const other = memory_->reserve(1);
  memory_->map(other, numbers(4, 1));
  EXPECT_EQ(static_cast<int>(other[0]), 7) << "the chunk itself keeps its contents";
  memory_->unmap(other, 1);
  memory_->release(other, 1);
}

TEST_F(chunk_space_test, work_that_is_thrown_away_gets_addresses_without_memory) {
  chunk_space space{*memory_, 4, 64, chunk_space::backing::pool, 8};
  space.grow(numbers(0, 2));
  auto* const backed = space.allocate(64_KiB);
  ASSERT_NE(backed, nullptr);
  EXPECT_FALSE(space.unbacked());
  auto* const first = space.allocate_unbacked(256_KiB);
  auto* const second = space.allocate_unbacked(320_KiB);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(space.allocate_unbacked(256_KiB), nullptr) << "the addresses are used up";
  EXPECT_TRUE(space.contains(second));
  EXPECT_EQ(space.room(), 0U);
  EXPECT_EQ(space.idle_chunks(), 0U);
  EXPECT_EQ(space.free(first), 256_KiB);
  EXPECT_EQ(space.free(second), 320_KiB);
  EXPECT_EQ(space.idle_chunks(), 1U) << "of those with memory";
  EXPECT_EQ(space.shrink(2), numbers(1, 1));
  EXPECT_FALSE(space.unbacked());
  EXPECT_EQ(space.free(backed), 64_KiB);
  EXPECT_EQ(space.shrink(2), numbers(0, 1));
}

TEST_F(chunk_space_test, a_closed_one_has_only_the_chunks_in_which_something_lives) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(numbers(3, 8));
  auto* const low = space.allocate(32_KiB);
  auto* const large = space.allocate(3 * 64_KiB);
  auto* const across = space.allocate(64_KiB);
  auto* const high = space.allocate(64_KiB);
  ASSERT_NE(high, nullptr);
  EXPECT_EQ(space.unused(), (chunk_space::unused_memory{2, 32_KiB}));  // at the end

  EXPECT_EQ(space.free(large), 3 * 64_KiB);
  EXPECT_EQ(space.unused(), (chunk_space::unused_memory{4, 3 * 32_KiB}));
  EXPECT_EQ(space.close(), (std::vector<std::uint32_t>{4, 5, 9, 10}));
  EXPECT_EQ(space.mapped_chunks(), 4U);
  EXPECT_TRUE(readable(low) && readable(across) && readable(high));
  EXPECT_FALSE(readable(large + 64_KiB) || readable(high + 2 * 64_KiB));
  EXPECT_EQ(space.allocate(1), nullptr) << "what is free may have no memory";
  EXPECT_EQ(space.room(), 0U);

  EXPECT_EQ(space.free(across), 64_KiB);
  EXPECT_EQ(space.close(), numbers(6, 1));
  EXPECT_EQ(space.free(low), 32_KiB);
  EXPECT_EQ(space.close(), numbers(3, 1));
  EXPECT_EQ(space.close(), numbers(0, 0));
  EXPECT_EQ(space.free(high), 64_KiB);
  EXPECT_EQ(space.close(), numbers(7, 2));
  EXPECT_EQ(space.mapped_chunks(), 0U);
}

TEST_F(chunk_space_test, what_is_parked_keeps_its_addresses_and_comes_back_in_other_chunks) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::pool};
  space.grow(numbers(2, 4));
  auto* const low = space.allocate(96_KiB);
  auto* const high = space.allocate(64_KiB);
  ASSERT_NE(high, nullptr);
  high[40_KiB] = std::byte{7};
  EXPECT_EQ(space.positions(true), numbers(0, 3));
  EXPECT_EQ(space.positions(false), numbers(3, 1));

  EXPECT_EQ(parked_of(space, 1, 2), numbers(3, 2));
  EXPECT_FALSE(readable(low + 64_KiB) || readable(high + 40_KiB));
  EXPECT_TRUE(readable(low));
  EXPECT_EQ(space.parked(), 2U);
  EXPECT_EQ(space.mapped_chunks(), 2U);
  EXPECT_EQ(space.positions(true), numbers(0, 1));
  EXPECT_EQ(space.room(), 0U) << "it would grow beyond a gap";
  EXPECT_EQ(space.idle_chunks(), 0U);
  EXPECT_EQ(space.shrink(4), numbers(0, 0));
  EXPECT_EQ(space.ranges().live(), 2U);
  auto* const more = space.allocate(32_KiB);
  ASSERT_NE(more, nullptr) << "addresses are given out all the same";

  space.unpark(1, numbers(8, 2));
  EXPECT_EQ(space.parked(), 0U);
  EXPECT_EQ(static_cast<int>(high[40_KiB]), 0) << "another chunk";
  high[40_KiB] = std::byte{9};
  EXPECT_EQ(parked_of(space, 2, 1), numbers(9, 1));
  EXPECT_EQ(space.free(high), 64_KiB);
  EXPECT_TRUE(space.is_in_use(2));
  EXPECT_EQ(space.free(more), 32_KiB);
  EXPECT_FALSE(space.is_in_use(2));
  space.unpark(2, numbers(9, 1));
  EXPECT_EQ(static_cast<int>(high[40_KiB]), 9);
  EXPECT_EQ(space.shrink(2), (std::vector<std::uint32_t>{9, 5}));
}

TEST_F(chunk_space_test, one_that_ends_parked_unmaps_what_is_there) {
  {
    chunk_space space{*memory_, 4, 64, chunk_space::backing::pool};
    space.grow(numbers(0, 3));
    ASSERT_NE(space.allocate(3 * 64_KiB), nullptr);
    EXPECT_EQ(parked_of(space, 1, 1), numbers(1, 1));
  }
  chunk_space next{*memory_, 16, 64, chunk_space::backing::pool};
  next.grow(numbers(0, 3));
  EXPECT_NE(next.allocate(3 * 64_KiB), nullptr);
}

TEST_F(chunk_space_test, private_backing_leaves_the_pools_chunk_untouched) {
  chunk_space space{*memory_, 16, 64, chunk_space::backing::process};
  space.grow(numbers(3, 1));
  auto* const address = space.allocate(64_KiB);
  ASSERT_NE(address, nullptr);
  std::memset(address, 9, 64_KiB);
  auto* const other = memory_->reserve(1);
  memory_->map(other, numbers(3, 1));
  EXPECT_EQ(static_cast<int>(other[0]), 0);
  memory_->unmap(other, 1);
  memory_->release(other, 1);
}

TEST_F(chunk_space_test, a_scrubbed_chunk_reads_zero) {
  auto* const at = memory_->reserve(2);
  memory_->map(at, numbers(6, 2));
  std::memset(at, 5, 2 * 64_KiB);
  memory_->scrub(at, numbers(6, 2));
  for (std::size_t i = 0; i < 2 * 64_KiB; ++i) {
    ASSERT_EQ(static_cast<int>(at[i]), 0);
  }
  memory_->unmap(at, 2);
  memory_->release(at, 2);
}

}  // namespace
}  // namespace sluice::memhandover
