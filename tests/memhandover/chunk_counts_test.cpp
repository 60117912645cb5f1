#include "memhandover/ledger/chunk_counts.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

class chunk_counts_test : public testing::Test {
 protected:
  static constexpr std::uint32_t chunks = 100;
  static constexpr std::uint16_t job = 3;
  static constexpr std::uint16_t other_job = 4;
  static constexpr std::uint16_t server = 5;
  static constexpr std::uint16_t engine = 6;

  void give(std::uint32_t first, std::uint32_t count, owner who, std::uint16_t client) {
    for (auto chunk = first; chunk < first + count; ++chunk) {
      view_.chunks()[chunk].store(chunk_state{who, false, client, 1}.pack());
    }
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, chunks});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(chunk_counts_test, all_of_a_new_pool_is_free) {
  auto const counted = count_chunks(view_);
  EXPECT_EQ(counted.free, chunks);
  EXPECT_EQ(counted.nobodys(), chunks);
  EXPECT_EQ(counted.dirty + counted.training + counted.serving + counted.engine + counted.left, 0U);
  EXPECT_EQ(counted.by_client, decltype(counted.by_client){});
}

TEST_F(chunk_counts_test, every_chunk_is_counted_once_for_its_owner_and_once_for_its_client) {
  give(0, 30, owner::training, job);
  give(30, 5, owner::training, other_job);
  give(35, 20, owner::serving, server);
  give(55, 7, owner::serving, left_slot);
  give(62, 8, owner::dirty, job);  // of whom it was
  give(70, 9, owner::engine, engine);
  auto const counted = count_chunks(view_);
  EXPECT_EQ(counted.free, 21U);
  EXPECT_EQ(counted.dirty, 8U);
  EXPECT_EQ(counted.nobodys(), 29U);
  EXPECT_EQ(counted.training, 35U);
  EXPECT_EQ(counted.serving, 27U);
  EXPECT_EQ(counted.left, 7U);
  EXPECT_EQ(counted.engine, 9U);
  EXPECT_EQ(counted.nobodys() + counted.training + counted.serving + counted.engine, chunks);
  std::array<std::uint32_t, max_clients> by_client{};
  by_client.at(job) = 30;
  by_client.at(other_job) = 5;
  by_client.at(server) = 20;
  by_client.at(engine) = 9;
  EXPECT_EQ(counted.by_client, by_client);
}

TEST_F(chunk_counts_test, what_is_damaged_is_counted_for_nobody) {
  give(0, 1, static_cast<owner>(7), job);
  give(1, 1, owner::training, max_clients);
  auto const counted = count_chunks(view_);
  EXPECT_EQ(counted.free, chunks - 2);
  EXPECT_EQ(counted.training, 1U);
  EXPECT_EQ(counted.by_client, decltype(counted.by_client){});
}

TEST_F(chunk_counts_test, whoever_looks_at_each_chunk_sees_what_is_counted) {
  give(4, 2, owner::serving, server);
  std::vector<std::uint32_t> seen;
  auto const counted = count_chunks(view_, [&seen](std::uint32_t chunk, chunk_state const& state) {
    if (state.who == owner::serving) {
      seen.push_back(chunk);
    }
  });
  EXPECT_EQ(counted.serving, 2U);
  EXPECT_EQ(seen, (std::vector<std::uint32_t>{4, 5}));
}

}  // namespace
}  // namespace sluice::memhandover
