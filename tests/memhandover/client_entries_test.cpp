#include "memhandover/ledger/client_entries.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/pool_status.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

TEST(client_entries, a_slots_next_owner_has_counted_nothing) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 8});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  write_client(view, 0, {client_kind::training, this_process(), 0, "first", ""});
  auto const fresh = describe_pool(view)["clients"][0];
  auto& mailbox = view.mailbox(0);
  // Whatever an owner may have left in what it says of itself.
  std::memset(static_cast<void*>(static_cast<client_report*>(&mailbox)), 1, sizeof(client_report));
  for (auto& note : view.chunk_notes(0)) {
    note.store(1);
  }
  mailbox.request.store(7);
  mailbox.mail_written.store(8);
  mailbox.demand_done.store(9);
  ASSERT_NE(describe_pool(view)["clients"][0], fresh);

  write_client(view, 0, {client_kind::training, this_process(), 0, "first", ""});
  EXPECT_EQ(describe_pool(view)["clients"][0], fresh);
  EXPECT_EQ(fresh["discarded_us"], 0);
  EXPECT_EQ(mailbox.released_ns, 0);
  EXPECT_EQ(mailbox.live_chunks, 0);
  EXPECT_EQ(view.chunk_notes(0)[3], 0);
  // By these the writer knows what it has read.
  EXPECT_EQ(mailbox.request, 7);
  EXPECT_EQ(mailbox.mail_written, 8);
  EXPECT_EQ(mailbox.demand_done, 9);
}

TEST(client_entries, who_is_held_by_an_operator_is_so_until_the_time_or_until_it_is_woken) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 8});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  write_client(view, 0, {client_kind::training, this_process(), 0, "job", ""});
  auto& entry = view.clients()[0];
  EXPECT_FALSE(is_held(entry));
  EXPECT_TRUE(describe_pool(view)["clients"][0]["parking"]["operator"].is_null());
  entry.held_until_ns.store(static_cast<std::uint64_t>(monotonic_ns() + 60'000'000'000));
  EXPECT_TRUE(is_held(entry));
  auto const left =
      describe_pool(view)["clients"][0]["parking"]["operator"]["left_s"].get<double>();
  EXPECT_GT(left, 0);
  EXPECT_LE(left, 60);
  entry.held_until_ns.store(static_cast<std::uint64_t>(monotonic_ns()));
  EXPECT_FALSE(is_held(entry));
  entry.held_until_ns.store(until_woken);
  EXPECT_TRUE(is_held(entry));
  write_client(view, 0, {client_kind::training, this_process(), 0, "next", ""});
  EXPECT_FALSE(is_held(entry)) << "an order is not the next owner's";
}

TEST(client_entries, what_stays_is_told_with_one_reason_for_each_chunk) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 8});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  write_client(view, 0, {client_kind::training, this_process(), 0, "job", ""});
  auto& mailbox = view.mailbox(0);
  auto const told = [&] {
    return describe_pool(view)["clients"][0]["parking"]["unparkable"].dump();
  };
  mailbox.kept_chunks.store(5);
  mailbox.parkable_chunks.store(3);
  EXPECT_EQ(told(), R"([{"bytes":4194304,"reason":"host copies are full"}])");
  view.header().serving_now.store(1);
  EXPECT_EQ(told(), R"([{"bytes":4194304,"reason":"host copies are full"},)"
                    R"({"bytes":6291456,"reason":"training.park of the server"}])");
  view.header().park_stay.store(10);
  mailbox.stays_until_ns.store(monotonic_ns() + 60'000'000'000);
  EXPECT_EQ(told(), R"([{"bytes":4194304,"reason":"host copies are full"},)"
                    R"({"bytes":6291456,"reason":"came back a moment ago"}])");
  mailbox.why_unparkable.store(static_cast<std::uint32_t>(unparkable::communicators));
  EXPECT_EQ(told(), R"([{"bytes":10485760,"reason":"communicators of NCCL"}])");
}

TEST(client_entries, a_place_that_no_live_client_has_is_of_no_kind) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 8});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  auto& entry = view.clients()[0];
  EXPECT_EQ(traits_of_live(entry), nullptr);
  for (auto const& kind : client_kinds) {
    write_client(view, 0, {kind.kind, this_process(), 0, "client", ""});
    EXPECT_EQ(traits_of_live(entry), &kind);
    for (auto const status : {client_status::gone, client_status::empty}) {
      entry.status.store(static_cast<std::uint32_t>(status));
      EXPECT_EQ(traits_of_live(entry), nullptr) << kind.name;
    }
  }
  entry.status.store(static_cast<std::uint32_t>(client_status::live));
  entry.kind.store(17);
  EXPECT_EQ(traits_of_live(entry), nullptr);
}

TEST(client_entries, each_kind_is_described_by_its_name_and_what_it_says) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 40});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  std::uint32_t slot = 0;
  for (auto const& kind : client_kinds) {
    write_client(view, slot++, {kind.kind, this_process(), 0, kind.name, "there"});
  }
  constexpr std::uint16_t engine = 2;
  for (std::uint32_t chunk = 5; chunk < 25; ++chunk) {
    view.chunks()[chunk].store(chunk_state{owner::engine, false, engine, 1}.pack());
  }
  chunk_notes notes{view, engine};
  notes.say(std::array{5U, 6U, 7U}, "cache");
  notes.say(std::array{8U, 9U, 10U, 11U}, "weights");
  view.mailbox(engine).kept_chunks.store(4);

  auto const told = describe_pool(view);
  EXPECT_EQ(told["pool"]["engine_bytes"], 40_MiB);
  EXPECT_EQ(told["pool"]["free_bytes"], 40_MiB);
  auto const& clients = told["clients"];
  EXPECT_EQ(clients[0]["kind"], "training");
  EXPECT_FALSE(clients[0].contains("holdings"));
  EXPECT_EQ(clients[1]["kind"], "server");
  EXPECT_EQ(clients[1]["endpoint"], "there");
  EXPECT_EQ(clients[2]["kind"], "engine");
  EXPECT_EQ(clients[2]["bytes"], 40_MiB);
  EXPECT_EQ(clients[2]["kept_bytes"], 8_MiB);
  EXPECT_EQ(clients[2]["holdings"],
            nlohmann::json::parse(R"([{"holds": "weights", "bytes": 8388608},
                                      {"holds": "cache", "bytes": 6291456},
                                      {"holds": null, "bytes": 27262976}])"));
  EXPECT_FALSE(clients[2].contains("commits"));
  EXPECT_EQ(describe_chunks(view, 5, 1)["runs"][0]["owner"], "engine");
  EXPECT_EQ(describe_chunks(view, 5, 1)["runs"][0]["holds"], "cache");
}

TEST(client_entries, more_than_a_line_has_room_for_is_told_as_one) {
  auto const files = create_ledger({backend_kind::host, -1, 2_MiB, 40});
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_write};
  write_client(view, 0, {client_kind::engine, this_process(), 0, "engine", ""});
  chunk_notes notes{view, 0};
  for (std::uint32_t chunk = 0; chunk < 40; ++chunk) {
    view.chunks()[chunk].store(chunk_state{owner::engine, false, 0, 1}.pack());
    notes.say(std::array{chunk}, "layer " + std::to_string(chunk));
  }
  auto const holdings = describe_pool(view)["clients"][0]["holdings"];
  ASSERT_EQ(holdings.size(), 9U);
  EXPECT_EQ(holdings[8]["holds"], nullptr);
  EXPECT_EQ(holdings[8]["bytes"], 64_MiB);
}

}  // namespace
}  // namespace sluice::memhandover
