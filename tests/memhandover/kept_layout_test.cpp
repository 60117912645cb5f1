#include "memhandover/allocation/detail/kept_layout.hpp"

#include <gtest/gtest.h>

#include <random>

#include "tests/from_environment.hpp"

namespace sluice::memhandover::detail {
namespace {

constexpr std::uint64_t chunk = 1024;
constexpr std::uint64_t unit = 16;

kept_layout a_layout() {
  return {.tag = "file 7",
          .sizes = {1500, 100, 0},
          .tensors = {{0, 0},
                      {tensor_spot::whole_view, 3 * chunk},
                      {tensor_spot::whole_view, 3 * chunk + 112}},
          .stitched = {{5, 1}}};
}

TEST(a_kept_layout, is_read_as_it_was_written) {
  auto const read = unpack(pack(a_layout()));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->tag, "file 7");
  EXPECT_EQ(read->sizes, a_layout().sizes);
  EXPECT_EQ(read->stitched, a_layout().stitched);
  ASSERT_EQ(read->tensors.size(), 3U);
  EXPECT_EQ(read->tensors[1].offset, 3 * chunk);
  EXPECT_EQ(read->tensors[0].range, 0U);
}

TEST(a_kept_layout, names_the_bytes_of_its_tensors_wherever_their_chunks_lie) {
  std::vector<std::uint32_t> const chunks{1, 3, 5};
  auto const found = extents_of(a_layout(), chunks, chunk, unit);
  ASSERT_TRUE(found);
  EXPECT_EQ(*found, (std::vector<extent>{{chunk, chunk + 480},
                                         {3 * chunk, 3 * chunk + 112},
                                         {3 * chunk + 112, 3 * chunk + 128},
                                         {5 * chunk, 6 * chunk}}));
}

TEST(a_kept_layout, that_names_what_it_has_not_is_refused) {
  std::vector<std::uint32_t> const chunks{1, 3, 5};
  auto const refused = [&](auto const& change) {
    auto layout = a_layout();
    change(layout);
    return !extents_of(layout, chunks, chunk, unit);
  };
  EXPECT_TRUE(refused([](kept_layout& of) { of.tensors[1].offset = 2 * chunk; }));  // not its chunk
  EXPECT_TRUE(refused([](kept_layout& of) { of.tensors[2].offset = 3 * chunk; }));  // twice
  EXPECT_TRUE(refused([](kept_layout& of) { of.stitched[0] = {3, 1}; }));           // by two ways
  EXPECT_TRUE(refused([](kept_layout& of) { of.tensors[0].range = 1; }));           // no such range
  EXPECT_TRUE(refused([](kept_layout& of) { of.tensors[1].offset += 1; }));         // not aligned
  EXPECT_TRUE(refused([](kept_layout& of) { of.sizes[0] = 2 * chunk + 1; }));  // beyond the range
  EXPECT_TRUE(
      refused([](kept_layout& of) { of.sizes[1] = ~std::uint64_t{0}; }));  // beyond everything
  EXPECT_TRUE(refused([](kept_layout& of) { of.tensors[1].offset = ~std::uint64_t{15}; }));
}

TEST(a_kept_layout, of_any_bytes_is_read_within_them) {
  auto const whole = pack(a_layout());
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    EXPECT_FALSE(unpack(std::span{whole}.first(bytes)));
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(unpack(longer));
  auto const seed = from_environment("SLUICE_TEST_SEED", std::random_device{}());
  SCOPED_TRACE("SLUICE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random{seed};
  std::vector<std::uint32_t> const chunks{1, 3, 5};
  for (unsigned i = 0; i < 20'000; ++i) {
    auto damaged = whole;
    for (auto flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    }
    if (auto const read = unpack(damaged)) {
      if (auto const found = extents_of(*read, chunks, chunk, unit)) {
        for (auto const& each : *found) {
          ASSERT_TRUE(each.begin < each.end && each.end <= 6 * chunk);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover::detail
