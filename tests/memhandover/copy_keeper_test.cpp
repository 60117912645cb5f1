#include "memhandover/broker/detail/copy_keeper.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "tests/memhandover/disk_folder.hpp"

namespace sluice::memhandover::detail {
namespace {

using namespace sluice::literals;
using std::chrono::steady_clock;
using testing::HasSubstr;
using testing::Not;

pool_shape copies_shape(std::uint64_t chunk_bytes, int device = 0,
                        backend_kind backend = backend_kind::cuda) {
  return {backend, device, chunk_bytes, 4};
}

class copy_keeper_test : public testing::Test {
 protected:
  static constexpr std::uint64_t chunk = 1_MiB;
  static constexpr std::uint64_t budget = 8 * chunk;
  static constexpr std::uint64_t pool = 7;
  static constexpr std::uint64_t other_pool = 8;
  static constexpr std::uint32_t client = 3;

  [[nodiscard]] copy_keeper::options how(std::uint64_t bytes = budget) {
    return {.budget = bytes,
            .lives =
                [this](auto id, auto slot) {
                  return living_.contains({id, slot});
                },
            .room =
                [this] {
                  return host_room{most_.load(), "the limit of the memory cgroup /a",
                                   available_.load(), "the machine"};
                }};
  }
  /// With copies, and a pool that has its place.
  void begin(copy_keeper& keeper) {
    keeper.make_for(copies_shape(chunk), 0);
    keeper.pool_came(pool, copies_shape(chunk));
  }
  static host_copy_files files_of(copy_keeper const& keeper) {
    auto const share = keeper.share_of(pool, client);
    return {duplicate(share.value().bytes_fd), duplicate(share.value().table_fd),
            share->disk_fd < 0 ? unique_fd{} : duplicate(share->disk_fd)};
  }
  static std::uint16_t holder_of(copy_keeper const& keeper, std::uint64_t id = pool) {
    return keeper.share_of(id, client).value().holder;
  }
  template <typename Condition>
  static void await(Condition const& holds, char const* what) {
    auto const deadline = steady_clock::now() + std::chrono::seconds{30};
    while (!holds()) {
      ASSERT_LT(steady_clock::now(), deadline) << "waited in vain for " << what;
      std::this_thread::yield();
    }
  }
  template <typename Call>
  static std::string message_of(Call&& call) {
    try {
      call();
    } catch (error const& why) {
      return why.what();
    }
    return "";
  }

  std::set<std::pair<std::uint64_t, std::uint32_t>> living_;
  std::atomic<std::uint64_t> most_{64_GiB};
  std::atomic<std::uint64_t> available_{64_GiB};
};

TEST_F(copy_keeper_test, has_none_where_nobody_asked_for_any) {
  copy_keeper none{how(0)};
  begin(none);
  EXPECT_TRUE(none.describe(pool).is_null());
  EXPECT_FALSE(none.share_of(pool, client));
}

TEST_F(copy_keeper_test, has_them_for_pools_on_the_host_too) {
  copy_keeper keeper{how()};
  keeper.make_for(copies_shape(chunk, 0, backend_kind::host), 0);
  keeper.pool_came(other_pool, copies_shape(chunk, 0, backend_kind::host));
  EXPECT_EQ(keeper.describe(other_pool)["bytes"], budget);
  EXPECT_EQ(keeper.share_of(other_pool, client)->slot_bytes, chunk);
  begin(keeper);
  EXPECT_EQ(keeper.share_of(pool, client)->slot_bytes, chunk) << "a pool that came later";
}

TEST_F(copy_keeper_test, refuses_a_budget_that_there_can_never_be_with_one_that_can) {
  most_ = 4_GiB;
  copy_keeper keeper{how(3_GiB)};
  auto const said = message_of([&] { keeper.make_for(copies_shape(chunk), 2_GiB); });
  for (auto const* const part : {"3 GiB", "4 GiB", "memory cgroup /a", "2 GiB are for pools",
                                 "ask for 1792MiB at most", "host_copies.memory"}) {
    EXPECT_THAT(said, HasSubstr(part));
  }
  copy_keeper again{how(1792_MiB)};
  EXPECT_EQ(message_of([&] { again.make_for(copies_shape(chunk), 2_GiB); }), "");
  most_ = 100_MiB;
  EXPECT_THAT(message_of([&] { keeper.make_for(copies_shape(chunk), 0); }),
              HasSubstr("ask for none"));
  EXPECT_THAT(message_of([&] { keeper.make_for(copies_shape(4_GiB), 0); }),
              HasSubstr("3 GiB, but one takes 4 GiB"));
}

TEST_F(copy_keeper_test, has_a_place_for_each_pool_until_there_is_none) {
  copy_keeper keeper{how()};
  begin(keeper);
  keeper.pool_came(other_pool, copies_shape(chunk, 1));
  EXPECT_NE(holder_of(keeper), holder_of(keeper, other_pool));
  for (std::uint64_t id = 100; id < 100 + host_copy_pools - 2; ++id) {
    keeper.pool_came(id, copies_shape(chunk, 2));
    EXPECT_TRUE(keeper.share_of(id, 0));
  }
  keeper.pool_came(9, copies_shape(chunk, 3));
  EXPECT_FALSE(keeper.share_of(9, 0));
  EXPECT_THAT(keeper.describe(9)["warning"].get<std::string>(), HasSubstr("no place"));
  EXPECT_EQ(keeper.describe(9)["bytes"], 0U);

  host_copy_table table{files_of(keeper)};
  ASSERT_EQ(table.copies().hold(2, holder_of(keeper)).size(), 2U);
  ASSERT_EQ(table.copies().hold(3, holder_of(keeper, other_pool)).size(), 3U);
  keeper.pool_went(other_pool);
  EXPECT_EQ(keeper.describe(pool)["held_bytes"], 2 * chunk);
  EXPECT_TRUE(keeper.describe(other_pool).is_null());
  keeper.pool_came(10, copies_shape(chunk, 4));
  EXPECT_TRUE(keeper.share_of(10, 0)) << "its place is another's now";
}

TEST_F(copy_keeper_test, says_of_a_pool_with_other_chunks_why_it_has_none) {
  copy_keeper keeper{how()};
  begin(keeper);
  keeper.pool_came(other_pool, copies_shape(2 * chunk, 1));
  EXPECT_FALSE(keeper.share_of(other_pool, client));
  auto const said = keeper.describe(other_pool);
  EXPECT_EQ(said["bytes"], 0U);
  EXPECT_EQ(said["populated_bytes"], 0U);
  EXPECT_THAT(said["warning"].get<std::string>(), HasSubstr("chunks of 2 MiB"));
  EXPECT_THAT(said["warning"].get<std::string>(), HasSubstr("slots of 1 MiB"));
  EXPECT_EQ(keeper.describe(pool)["bytes"], budget);
}

TEST_F(copy_keeper_test, makes_pages_present_where_the_host_has_the_room_and_says_if_not) {
  available_ = 100_MiB;
  copy_keeper keeper{how()};
  begin(keeper);
  await([&] { return keeper.describe(pool)["warning"].is_string(); }, "a word about the room");
  EXPECT_THAT(keeper.describe(pool)["warning"].get<std::string>(),
              HasSubstr("100 MiB available (the machine); 8 MiB"));
  EXPECT_EQ(keeper.describe(pool)["populated_bytes"], 0U);
  EXPECT_EQ(keeper.untouched_bytes(), budget);
  available_ = 64_GiB;
  await([&] { return keeper.describe(pool)["populated_bytes"] == budget; }, "the pages");
  await([&] { return keeper.describe(pool)["warning"].is_null(); }, "no word about it");
  EXPECT_EQ(keeper.untouched_bytes(), 0U);
}

TEST_F(copy_keeper_test, makes_pages_present_whatever_clients_write_of_them) {
  available_ = 0;
  copy_keeper keeper{how()};
  begin(keeper);
  host_copy_table table{files_of(keeper)};
  await([&] { return keeper.describe(pool)["warning"].is_string(); }, "a word about the room");
  for (auto const value : {~0ULL, 1ULL << 63U, 12345ULL, 0ULL}) {
    table.header().populated.store(value);
    EXPECT_EQ(keeper.describe(pool)["populated_bytes"], 0U);
  }
  table.header().populated.store(~0ULL);
  available_ = 64_GiB;
  await([&] { return table.header().populated.load() == budget; }, "the number of pages");
  EXPECT_EQ(keeper.untouched_bytes(), 0U);
}

TEST_F(copy_keeper_test, of_a_damaged_table_uses_what_is_whole) {
  copy_keeper keeper{how()};
  begin(keeper);
  auto const holder = holder_of(keeper);
  host_copy_table table{files_of(keeper)};
  ASSERT_EQ(table.copies().hold(2, holder).size(), 2U);
  auto words = host_copies_words({table.segment().data(), table.segment().bytes()}, table.shape());
  words[0].store(~0ULL);
  words[5].store(3ULL << 56U);
  auto& header = table.header();
  for (auto* const each : {&header.magic, &header.slot_bytes, &header.budget}) {
    each->store(0);
  }
  header.slots.store(1U << 31U);
  for (auto& place : header.pools) {
    place.store(0);
  }
  auto const said = keeper.describe(pool);
  EXPECT_EQ(said["bytes"], budget);
  EXPECT_EQ(said["held_bytes"], chunk);
  EXPECT_EQ(said["damaged_bytes"], 2 * chunk);
  EXPECT_EQ(said["free_bytes"], budget - 3 * chunk);
  EXPECT_THAT(said["warning"].get<std::string>(), HasSubstr("2 of their slots are damaged"));
  EXPECT_EQ(holder_of(keeper), holder);
  EXPECT_EQ(keeper.sweep(pool, client), 1U);
  EXPECT_EQ(keeper.sweep(pool, client), 0U);
  keeper.pool_went(pool);
}

TEST_F(copy_keeper_test, adopts_those_of_an_earlier_broker_and_frees_what_the_dead_had) {
  copy_keeper first{how()};
  begin(first);
  first.pool_came(other_pool, copies_shape(chunk, 1));
  first.pool_came(9, copies_shape(chunk, 2));
  host_copy_table table{files_of(first)};
  auto const holder = holder_of(first);
  auto const of_other = holder_of(first, other_pool);
  ASSERT_EQ(table.copies().hold(1, holder).size(), 1U);
  ASSERT_EQ(table.copies().hold(1, static_cast<std::uint16_t>(holder + 1)).size(), 1U);
  ASSERT_EQ(table.copies().hold(2, of_other).size(), 2U);
  ASSERT_EQ(table.copies().hold(1, holder_of(first, 9)).size(), 1U);
  ASSERT_EQ(table.copies().hold(1, copy_holder(host_copy_pools - 1, 0)).size(), 1U);

  living_ = {{pool, client}, {other_pool, client}};
  copy_keeper next{how(0)};
  next.pool_came(pool, copies_shape(chunk));
  next.adopt(files_of(first), pool, client, holder);
  EXPECT_EQ(next.describe(pool)["held_bytes"], 3 * chunk) << "of two clients that live";
  EXPECT_EQ(holder_of(next), holder);
  next.pool_came(other_pool, copies_shape(chunk, 1));
  EXPECT_EQ(holder_of(next, other_pool), of_other);
  next.adopt(files_of(first), other_pool, client, of_other);
  EXPECT_EQ(next.sweep(other_pool, client), 2U);
  EXPECT_EQ(next.describe(pool)["held_bytes"], chunk);

  living_.clear();
  next.tidy();
  EXPECT_EQ(next.describe(pool)["free_bytes"], budget);
}

TEST_F(copy_keeper_test, has_a_disk_beyond_the_memory_which_the_next_adopts) {
  test::disk_folder const folder;
  if (folder.path().empty()) {
    GTEST_SKIP() << "there is no folder on a disk";
  }
  auto wanted = how();
  wanted.disk = {folder.path(), 3 * chunk + 1};
  copy_keeper first{wanted};
  begin(first);
  EXPECT_TRUE(folder.is_empty());
  auto const said = first.describe(pool);
  EXPECT_EQ(said["bytes"], budget);
  EXPECT_EQ(said["disk"]["bytes"], 3 * chunk);
  EXPECT_EQ(said["disk"]["free_bytes"], 3 * chunk);
  EXPECT_EQ(first.share_of(pool, client)->disk_bytes, 3 * chunk);

  auto const holder = holder_of(first);
  host_copy_table table{files_of(first)};
  ASSERT_EQ(table.copies().hold(10, holder).size(), 10U);
  EXPECT_EQ(first.describe(pool)["held_bytes"], budget);
  EXPECT_EQ(first.describe(pool)["disk"]["held_bytes"], 2 * chunk);

  living_ = {{pool, client}};
  copy_keeper next{how(0)};
  next.pool_came(pool, copies_shape(chunk));
  auto without = files_of(first);
  without.disk = {};
  EXPECT_THAT(message_of([&] { next.adopt(std::move(without), pool, client, holder); }),
              HasSubstr("bytes on disk, but there are 0"));
  next.adopt(files_of(first), pool, client, holder);
  EXPECT_EQ(next.describe(pool)["disk"]["held_bytes"], 2 * chunk);
  auto memory_alone = files_of(first);
  memory_alone.disk = {};
  EXPECT_THAT(message_of([&] { next.adopt(std::move(memory_alone), pool, client, holder); }),
              HasSubstr("not those"));
  EXPECT_EQ(next.sweep(pool, client), 10U);
  EXPECT_EQ(next.describe(pool)["disk"]["free_bytes"], 3 * chunk);
}

TEST_F(copy_keeper_test, refuses_a_disk_that_will_not_do) {
  test::disk_folder const folder;
  if (folder.path().empty()) {
    GTEST_SKIP() << "there is no folder on a disk";
  }
  auto const refusal = [&](disk_wish const& disk) {
    auto wanted = how();
    wanted.disk = disk;
    copy_keeper keeper{wanted};
    return message_of([&] { keeper.make_for(copies_shape(chunk), 0); });
  };
  EXPECT_THAT(refusal({folder.path() + "/none", chunk}), HasSubstr("there is no folder"));
  EXPECT_THAT(refusal({folder.path(), chunk - 1}), HasSubstr("on disk, but one takes 1 MiB"));
  EXPECT_THAT(refusal({folder.path(), read_disk_room(folder.path()).most}),
              HasSubstr("are available"));
  EXPECT_EQ(refusal({folder.path(), chunk}), "");
  EXPECT_TRUE(folder.is_empty());
}

TEST_F(copy_keeper_test, adopts_none_that_are_damaged_or_others) {
  copy_keeper first{how()};
  begin(first);
  auto const holder = holder_of(first);
  host_copy_table table{files_of(first)};
  living_ = {{pool, client}};

  copy_keeper next{how(0)};
  next.pool_came(pool, copies_shape(chunk));
  auto const adopt = [&](host_copy_files files, std::uint32_t as) {
    return message_of([&] { next.adopt(std::move(files), pool, client, as); });
  };
  table.header().version.store(9);
  EXPECT_THAT(adopt(files_of(first), holder), HasSubstr("version 9"));
  table.header().version.store(host_copies_version);
  table.header().pools[5].store(pool);
  EXPECT_THAT(adopt(files_of(first), holder), HasSubstr("two places"));
  EXPECT_TRUE(next.describe(pool).is_null());
  table.header().pools[5].store(0);
  EXPECT_EQ(adopt(files_of(first), holder), "");
  EXPECT_EQ(next.describe(pool)["bytes"], budget);

  copy_keeper with_larger_chunks{how(0)};
  with_larger_chunks.pool_came(pool, copies_shape(2 * chunk));
  EXPECT_THAT(message_of([&] { with_larger_chunks.adopt(files_of(first), pool, client, holder); }),
              HasSubstr("no place of its pool"));
  EXPECT_FALSE(with_larger_chunks.share_of(pool, client));

  EXPECT_THAT(adopt(create_host_copies(budget, chunk), holder), HasSubstr("not those"));
  EXPECT_THAT(adopt(files_of(first), holder + 1U),
              HasSubstr("as holder 3, but it takes itself for holder 4"));
  EXPECT_THAT(adopt(files_of(first), ~0U), HasSubstr("takes itself for holder"));
  EXPECT_EQ(adopt(files_of(first), holder), "");
}

TEST_F(copy_keeper_test, gives_a_client_of_a_table_whose_places_were_erased_a_refusal) {
  copy_keeper first{how()};
  first.make_for(copies_shape(chunk), 0);
  first.pool_came(other_pool, copies_shape(chunk, 1));
  first.pool_came(pool, copies_shape(chunk));
  auto const holder = holder_of(first);
  host_copy_table table{files_of(first)};
  ASSERT_EQ(table.copies().hold(2, holder).size(), 2U);
  for (auto& place : table.header().pools) {
    place.store(0);
  }
  living_ = {{pool, client}};
  copy_keeper next{how(0)};
  next.pool_came(pool, copies_shape(chunk));
  EXPECT_THAT(message_of([&] { next.adopt(files_of(first), pool, client, holder); }),
              HasSubstr("no place of its pool, but it takes itself for holder 35"));
  EXPECT_TRUE(next.describe(pool).is_null());
  EXPECT_EQ(table.copies().count().held, 2U) << "what it has parked is still there";
}

}  // namespace
}  // namespace sluice::memhandover::detail
