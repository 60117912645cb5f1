#include "memhandover/device/content_hash.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace sluice::memhandover {
namespace {

std::vector<std::byte> random_contents(std::size_t bytes) {
  std::mt19937 random{7};
  std::vector<std::byte> contents(bytes);
  for (auto& byte : contents) {
    byte = static_cast<std::byte>(random());
  }
  return contents;
}

TEST(content_hash_test, zero_contents_are_known_as_such_and_one_bit_ends_it) {
  std::vector<std::byte> contents(1U << 16U);
  EXPECT_TRUE(hash_contents(contents).zero());
  contents.back() = std::byte{128};
  EXPECT_FALSE(hash_contents(contents).zero());
}

TEST(content_hash_test, zeroes_of_different_sizes_differ) {
  std::vector<std::byte> const contents(64);
  EXPECT_NE(hash_contents(contents), hash_contents(std::span{contents}.first(48)));
}

TEST(content_hash_test, each_flipped_bit_changes_both_halves) {
  auto contents = random_contents(512);
  auto const before = hash_contents(contents);
  for (std::size_t bit = 0; bit < contents.size() * 8; ++bit) {
    auto const mask = static_cast<std::byte>(1U << (bit % 8));
    contents[bit / 8] ^= mask;
    auto const after = hash_contents(contents);
    EXPECT_NE(after.first, before.first) << bit;
    EXPECT_NE(after.second, before.second) << bit;
    contents[bit / 8] ^= mask;
  }
  EXPECT_EQ(hash_contents(contents), before);
}

TEST(content_hash_test, exchanged_halves_and_blocks_differ) {
  auto contents = random_contents(4096);
  auto const before = hash_contents(contents);
  for (std::size_t block = 8; block <= 2048; block *= 2) {
    auto exchanged = contents;
    std::swap_ranges(exchanged.begin(), exchanged.begin() + static_cast<std::ptrdiff_t>(block),
                     exchanged.begin() + static_cast<std::ptrdiff_t>(block));
    auto const after = hash_contents(exchanged);
    EXPECT_NE(after.first, before.first) << block;
    EXPECT_NE(after.second, before.second) << block;
  }
}

TEST(content_hash_test, words_may_be_added_in_any_order) {
  content_hash there;
  content_hash back;
  for (std::uint64_t place = 0; place < 100; ++place) {
    add_word(there, place, place * place, ~place);
    add_word(back, 99 - place, (99 - place) * (99 - place), ~(99 - place));
  }
  EXPECT_EQ(there, back);
}

TEST(content_hash_test, the_words_of_a_small_content_are_fixed) {
  std::vector<std::byte> contents(48);
  for (std::size_t i = 0; i < contents.size(); ++i) {
    contents[i] = static_cast<std::byte>(i);
  }
  auto const hash = hash_contents(contents);
  EXPECT_EQ(hash.first, 0x09505EC2C397E698U);
  EXPECT_EQ(hash.second, 0x27165F15028566F0U);
  EXPECT_EQ(hash.bits, 0x3F3E3D3C3B3A3938U);
}

}  // namespace
}  // namespace sluice::memhandover
