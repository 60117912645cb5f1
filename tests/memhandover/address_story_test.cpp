#include "memhandover/ledger/address_story.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <numeric>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using nlohmann::json;

class address_story_test : public testing::Test {
 protected:
  static constexpr std::uint32_t job = 2;
  static constexpr std::uint32_t server = 5;
  static constexpr std::uint64_t base = 0x7f00'0000'0000;

  static void const* at(std::uint64_t offset) {
    return reinterpret_cast<void const*>(base + offset);  // only ever a number
  }
  [[nodiscard]] json stays(std::uint64_t offset) const {
    return describe_address(view_, base + offset)["stays"];
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, 100});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(address_story_test, follows_a_chunk_from_the_arena_to_a_model) {
  chunk_history history{view_, job};
  chunk_history models{view_, server};
  history.record_reserved(at(0), 200, 7, "arena");
  history.record(chunk_event::mapped, std::array{10U, 11U, 30U}, at(0), 7, "arena");
  history.record(chunk_event::revoked, std::array{10U, 11U, 30U}, at(0), 7, "arena");
  history.record(chunk_event::given, std::array{11U, 30U});
  models.record(chunk_event::taken, std::array{29U, 30U}, nullptr, 0, "bert");
  models.record(chunk_event::taken, std::array{30U}, nullptr, 0, "resnet");

  auto const found = stays(4_MiB + 5);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0]["chunk"], 30);
  EXPECT_EQ(found[0]["offset"], 5);
  EXPECT_EQ(found[0]["generation"], 7);
  EXPECT_EQ(found[0]["pid"], ::getpid());
  EXPECT_EQ(found[0]["holds"], "arena");
  EXPECT_EQ(found[0]["ended"]["how"], "revoked");
  EXPECT_EQ(found[0]["went_to"]["slot"], server);
  EXPECT_EQ(found[0]["went_to"]["holds"], "bert");

  auto const kept = stays(0);
  ASSERT_EQ(kept.size(), 1U);
  EXPECT_EQ(kept[0]["chunk"], 10);
  EXPECT_EQ(kept[0]["ended"]["how"], "revoked");
  EXPECT_TRUE(kept[0]["went_to"].is_null());

  EXPECT_TRUE(stays(6_MiB).empty());
  EXPECT_EQ(describe_address(view_, base + 6_MiB)["reserved"][0]["generation"], 7);
  EXPECT_TRUE(describe_address(view_, base - 1)["reserved"].empty());
}

TEST_F(address_story_test,
       tells_whose_address_it_is_by_what_the_writer_was_and_not_by_who_has_the_slot_now) {
  constexpr std::uint32_t slot = 4;
  write_client(view_, slot, {client_kind::engine, this_process(), 0, "vllm", ""});
  chunk_history{view_, slot}.record(chunk_event::mapped, std::array{3U}, at(0), 0, "weights");
  write_client(view_, server, {client_kind::server, this_process(), 0, "server", ""});
  chunk_history{view_, server}.record(chunk_event::taken, std::array{7U}, at(8_MiB), 0, "bert");
  view_.chunks()[3].store(chunk_state{owner::engine, false, slot, 1}.pack());
  write_client(view_, slot, {client_kind::training, this_process(), 0, "job", ""});

  EXPECT_EQ(stays(0)[0]["kind"], "engine");
  EXPECT_EQ(stays(0)[0]["holds"], "weights");
  EXPECT_EQ(stays(0)[0]["now"]["owner"], "engine");
  EXPECT_EQ(stays(8_MiB)[0]["kind"], "server");
}

TEST_F(address_story_test, a_chunk_that_training_used_again_did_not_go_to_the_later_taker) {
  chunk_history history{view_, job};
  chunk_history models{view_, server};
  history.record(chunk_event::mapped, std::array{4U}, at(0), 1, "arena");
  history.record(chunk_event::revoked, std::array{4U}, at(0), 1, "arena");
  history.record(chunk_event::given, std::array{4U});
  history.record(chunk_event::mapped, std::array{4U}, at(64_MiB), 2, "arena");
  models.record(chunk_event::taken, std::array{4U}, nullptr, 0, "bert");
  auto const first = stays(0);
  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0]["went_to"]["slot"], job);
  EXPECT_EQ(first[0]["went_to"]["generation"], 2);
  auto const second = stays(64_MiB);
  ASSERT_EQ(second.size(), 1U);
  EXPECT_TRUE(second[0]["ended"].is_null());
}

TEST_F(address_story_test, mappings_that_continue_each_other_are_one_entry) {
  chunk_history history{view_, job};
  for (std::uint32_t i = 0; i < 50; ++i) {
    history.record(chunk_event::mapped, std::array{i}, at(i * 2_MiB), 1, "arena");
  }
  auto const read = read_history(view_, job);
  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(read[0].count, 50U);
  EXPECT_GE(read[0].until_ns, read[0].from_ns);
  EXPECT_EQ(stays(98_MiB)[0]["chunk"], 49);
  // Another range, and a gap, begin an entry of their own.
  history.record(chunk_event::mapped, std::array{50U}, at(200_MiB), 1, "arena");
  history.record(chunk_event::mapped, std::array{51U}, at(202_MiB), 2, "arena");
  history.record(chunk_event::mapped, std::array{60U}, at(204_MiB), 2, "arena");
  EXPECT_EQ(read_history(view_, job).size(), 4U);
}

TEST_F(address_story_test, keeps_the_newest_entries_and_says_that_older_ones_are_gone) {
  chunk_history history{view_, job};
  history.record(chunk_event::mapped, std::array{1U}, at(0), 1, "arena");
  history.record(chunk_event::unmapped, std::array{1U}, at(0), 1, "arena");
  EXPECT_EQ(describe_address(view_, base)["complete"], true);
  for (std::uint32_t i = 0; i < history_entries; ++i) {
    history.record(chunk_event::given, std::array{i % 100});
  }
  EXPECT_EQ(read_history(view_, job).size(), history_entries);
  EXPECT_TRUE(stays(0).empty());
  EXPECT_EQ(describe_address(view_, base)["complete"], false);
}

TEST_F(address_story_test, what_is_still_mapped_outlives_any_number_of_later_events) {
  chunk_history history{view_, job};
  history.record(chunk_event::mapped, std::array{7U, 8U, 9U}, at(0), 0, "persistent");
  history.record(chunk_event::unmapped, std::array{9U}, at(4_MiB), 0, "persistent");
  for (std::uint32_t i = 0; i < 3 * history_entries; ++i) {
    history.record(chunk_event::mapped, std::array{i % 50 * 2}, at(64_MiB), i, "arena");
    history.record(chunk_event::revoked, std::array{i % 50 * 2}, at(64_MiB), i, "arena");
  }
  EXPECT_EQ(read_history(view_, job).size(), history_entries);
  for (auto const& [offset, chunk] : {std::pair{0_MiB, 7}, std::pair{2_MiB, 8}}) {
    auto const found = stays(offset);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0]["holds"], "persistent");
    EXPECT_EQ(found[0]["chunk"], chunk);
    EXPECT_TRUE(found[0]["ended"].is_null());
  }
  EXPECT_TRUE(stays(4_MiB).empty());  // it has ended, and nothing tells of it any more

  history.record(chunk_event::revoked, std::array{7U, 8U}, at(0), 0, "persistent");
  EXPECT_EQ(stays(0)[0]["ended"]["how"], "revoked");
  for (std::uint32_t i = 0; i < history_entries; ++i) {
    history.record(chunk_event::given, std::array{1U});
  }
  EXPECT_TRUE(stays(0).empty());
}

TEST_F(address_story_test, mappings_that_hold_leave_half_of_the_history_to_what_happens) {
  chunk_history history{view_, job};
  for (std::uint32_t i = 0; i < 2 * history_entries; ++i) {
    history.record(chunk_event::mapped, std::array{i % 50 * 2}, at(i * 4_MiB), 0, "arena");
  }
  history.record(chunk_event::given, std::array{99U});
  auto const entries = read_history(view_, job);
  ASSERT_EQ(entries.size(), history_entries);
  EXPECT_EQ(entries.back().kind, chunk_event::given);
  for (std::size_t i = 1; i < entries.size(); ++i) {
    EXPECT_EQ(entries[i].seq, entries[i - 1].seq + 1);
  }
}

TEST_F(address_story_test, the_slots_next_owner_goes_on_behind_what_a_dead_one_has_left) {
  chunk_history{view_, job}.record(chunk_event::mapped, std::array{1U}, at(0), 1, "arena");
  chunk_history next{view_, job};
  next.record(chunk_event::mapped, std::array{2U}, at(0), 1, "arena");
  auto const found = stays(0);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0]["chunk"], 2);
  EXPECT_EQ(found[1]["chunk"], 1);
  EXPECT_EQ(found[1]["lives"], false);
}

TEST_F(address_story_test, one_processs_address_is_not_taken_for_anothers_of_the_same_number) {
  chunk_history history{view_, job};
  history.record_reserved(at(0), 200, 0, "persistent");
  history.record(chunk_event::mapped, std::array{1U}, at(0), 0, "persistent");
  auto const server_pid = ::fork();
  if (server_pid == 0) {
    // The driver gives every process the same addresses; a server that says no name holds nothing.
    chunk_history{view_, server}.record(chunk_event::taken, std::array{9U}, at(0));
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(server_pid, nullptr, 0), server_pid);

  EXPECT_EQ(stays(0).size(), 2U);
  auto const own = describe_address(view_, base + 5, static_cast<std::uint32_t>(::getpid()));
  ASSERT_EQ(own["stays"].size(), 1U);
  EXPECT_EQ(own["stays"][0]["holds"], "persistent");
  EXPECT_EQ(own["stays"][0]["chunk"], 1);
  EXPECT_EQ(own["reserved"].size(), 1U);
  auto const others = describe_address(view_, base + 5, static_cast<std::uint32_t>(server_pid));
  ASSERT_EQ(others["stays"].size(), 1U);
  EXPECT_EQ(others["stays"][0]["chunk"], 9);
  EXPECT_TRUE(others["reserved"].empty());
}

TEST_F(address_story_test, is_readable_while_it_is_written) {
  chunk_history history{view_, job};
  std::jthread const writer{[&](std::stop_token const& stop) {
    for (std::uint32_t i = 0; !stop.stop_requested(); ++i) {
      history.record(chunk_event::mapped, std::array{i % 100}, at(i % 100 * 2_MiB), i, "arena");
    }
  }};
  std::size_t read = 0;
  while (read < 20 * history_entries) {
    auto const entries = read_history(view_, job);
    read += entries.size() + 1;
    for (auto const& entry : entries) {
      ASSERT_EQ(entry.address, base + entry.first * 2_MiB);
      ASSERT_EQ(entry.generation % 100, entry.first);
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
