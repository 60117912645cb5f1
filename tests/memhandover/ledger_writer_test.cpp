#include "memhandover/ledger/ledger_writer.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <array>
#include <chrono>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/job_needs.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr std::uint32_t chunks = 40;

/// A ledger with live training clients in slots 0 and 1, a server in slot 2, engines in slots 3 and 4, and the mail
/// that clients write.
class ledger_writer_test : public testing::Test {
 protected:
  void SetUp() override {
    constexpr std::array kinds{client_kind::training, client_kind::training, client_kind::server,
                               client_kind::engine, client_kind::engine};
    for (std::uint32_t slot = 0; slot < kinds.size(); ++slot) {
      auto& entry = view_.clients()[slot];
      entry.kind.store(static_cast<std::uint32_t>(kinds.at(slot)));
      entry.status.store(static_cast<std::uint32_t>(client_status::live));
    }
  }

  void request(std::uint32_t slot, std::uint32_t count) {
    auto& word = view_.mailbox(slot).request;
    word.store(numbered{numbered::unpack(word.load()).seq + 1, count}.pack());
  }
  [[nodiscard]] numbered granted(std::uint32_t slot) const {
    return numbered::unpack(view_.controls()[slot].grant.load());
  }
  void mail(std::uint32_t slot, std::uint32_t chunk, std::uint32_t epoch) {
    auto const ring = view_.mail_ring(slot);
    auto& written = view_.mailbox(slot).mail_written;
    ring[written.load() & (ring.size() - 1)].store(release_mail{chunk, epoch}.pack());
    written.fetch_add(1);
  }
  [[nodiscard]] std::vector<std::uint32_t> held(std::uint32_t slot) const {
    std::vector<std::uint32_t> result;
    for (std::uint32_t i = 0; i < chunks; ++i) {
      auto const state = view_.chunk(i);
      if (state.who != owner::free && state.who != owner::dirty && state.client == slot) {
        result.push_back(i);
      }
    }
    return result;
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, chunks});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(ledger_writer_test, demands_nothing_of_the_next_owner_of_a_dead_clients_slot) {
  ledger_writer writer{view_};
  auto const asked = writer.demand(0, 7);
  writer.report_refused(0, 5);
  writer.reclaim(0);
  EXPECT_EQ(view_.controls()[0].refused, 0U)
      << "it is told what was refused because of the last one";
  auto const now = numbered::unpack(view_.controls()[0].demand.load());
  EXPECT_EQ(now.chunks, 0U);
  EXPECT_NE(now.seq, asked);
}

TEST_F(ledger_writer_test, grants_what_is_free_and_no_more) {
  ledger_writer writer{view_};
  request(0, 30);
  request(1, 30);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 30U);
  EXPECT_EQ(granted(1).chunks, 10U);
  EXPECT_EQ(held(0).size(), 30U);
  EXPECT_EQ(writer.free_chunks(), 0U);
  EXPECT_EQ(view_.header().grantable.load(), 0U);
}

TEST_F(ledger_writer_test, answers_a_request_once) {
  ledger_writer writer{view_};
  request(0, 3);
  writer.pump();
  writer.pump();
  EXPECT_EQ(held(0).size(), 3U);
}

TEST_F(ledger_writer_test, keeps_the_reserve_from_training_and_not_from_serving) {
  ledger_writer writer{view_};
  writer.set_reserve(35);
  request(0, 30);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 5U);
  EXPECT_EQ(writer.take(30, 2).size(), 30U);
}

TEST_F(ledger_writer_test, grants_nothing_of_what_an_acquisition_waits_for) {
  ledger_writer writer{view_};
  writer.set_wanted(40);
  request(0, 1);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
}

TEST_F(ledger_writer_test, takes_a_release_only_in_the_epoch_that_it_gives_up) {
  ledger_writer writer{view_};
  request(0, 1);
  writer.pump();
  auto const chunk = held(0).front();
  auto const epoch = view_.chunk(chunk).epoch;
  mail(0, chunk, epoch);
  EXPECT_EQ(writer.pump(), 1U);
  EXPECT_EQ(view_.chunk(chunk).who, owner::dirty);
  auto const taken = writer.take(chunks, 2);
  EXPECT_EQ(taken.size(), chunks);
  mail(0, chunk, epoch);
  EXPECT_EQ(writer.pump(), 0U) << "the chunk is the server's by now";
  EXPECT_EQ(view_.chunk(chunk).who, owner::serving);
}

TEST_F(ledger_writer_test,
       what_a_dead_server_leaves_keeps_its_epoch_and_is_nobodys_until_it_is_claimed) {
  ledger_writer writer{view_};
  auto const taken = writer.take(10, 2);
  std::vector<std::uint32_t> const published(taken.begin(), taken.begin() + 6);
  auto const epoch = view_.chunk(taken.front()).epoch;
  EXPECT_EQ(writer.leave(published, 2), 6U);
  EXPECT_EQ(writer.leave(published, 2), 0U) << "they are not the server's any more";
  EXPECT_EQ(writer.reclaim(2), 4U);
  EXPECT_EQ(writer.free_chunks(), chunks - 6);
  EXPECT_EQ(view_.chunk(taken.front()).who, owner::serving);
  EXPECT_EQ(view_.chunk(taken.front()).epoch, epoch);
  ledger_writer next{view_};
  EXPECT_EQ(next.left_chunks(), 6U);
  next.claim(std::vector<std::uint32_t>(published.begin(), published.begin() + 2), 3);
  EXPECT_EQ(next.left_chunks(), 4U);
  EXPECT_EQ(view_.chunk(taken.front()).client, 3);
  EXPECT_EQ(view_.chunk(taken.front()).epoch, epoch);
  EXPECT_EQ(next.release_left(chunks), 4U);
  EXPECT_EQ(next.left_chunks(), 0U);
  EXPECT_EQ(next.free_chunks(), chunks - 2);
}

TEST_F(ledger_writer_test, what_is_left_is_not_offered_to_training_but_given_when_it_asks) {
  ledger_writer writer{view_};
  writer.leave(writer.take(30, 2), 2);
  writer.set_reserve(0);
  EXPECT_EQ(view_.header().grantable.load(), 10U);
  request(0, 8);
  writer.pump();
  EXPECT_EQ(writer.left_chunks(), 30U) << "there was enough beside it";
  request(0, 12);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 12U);
  EXPECT_EQ(writer.left_chunks(), 20U) << "no more than it takes";
  view_.mailbox(1).waiting.store(1);
  writer.pump();
  EXPECT_EQ(writer.left_chunks(), 0U) << "who waits is not held up";
  EXPECT_EQ(view_.header().grantable.load(), 20U);
}

TEST_F(ledger_writer_test, ignores_mail_about_chunks_that_are_not_the_senders_or_do_not_exist) {
  ledger_writer writer{view_};
  request(0, 2);
  writer.pump();
  auto const chunk = held(0).front();
  mail(1, chunk, view_.chunk(chunk).epoch);
  mail(1, 0xffffffffU, 1);
  EXPECT_EQ(writer.pump(), 0U);
  EXPECT_EQ(held(0).size(), 2U);
}

TEST_F(ledger_writer_test, survives_a_mailbox_that_claims_more_mail_than_its_ring_holds) {
  ledger_writer writer{view_};
  view_.mailbox(0).mail_written.store(0xffffffffffULL);
  EXPECT_EQ(writer.pump(), 0U);
  EXPECT_EQ(writer.free_chunks(), chunks);
}

TEST_F(ledger_writer_test, prefers_the_shortest_run_that_is_long_enough) {
  ledger_writer writer{view_};
  auto const all = writer.take(chunks, 2);
  std::vector<std::uint32_t> back{2, 3, 4, 5, 6, 7, 20, 21, 22, 30};
  writer.give_back(back);
  EXPECT_EQ(writer.take(3, 2), (std::vector<std::uint32_t>{20, 21, 22}));
  EXPECT_EQ(writer.take(7, 2), (std::vector<std::uint32_t>{2, 3, 4, 5, 6, 7, 30}))
      << "no run is long enough";
}

TEST_F(ledger_writer_test, marks_used_chunks_for_scrubbing_when_training_gets_them) {
  ledger_writer writer{view_};
  writer.give_back(writer.take(chunks, 2));
  request(0, 1);
  writer.pump();
  EXPECT_TRUE(view_.chunk(held(0).front()).needs_scrub);
}

TEST_F(ledger_writer_test, reclaim_frees_all_that_a_client_held_and_forgets_its_mail) {
  ledger_writer writer{view_};
  request(0, 10);
  request(1, 10);
  writer.pump();
  auto const stale = held(0).front();
  mail(0, stale, view_.chunk(stale).epoch);
  EXPECT_EQ(writer.reclaim(0), 10U);
  EXPECT_EQ(writer.free_chunks(), 30U);
  EXPECT_EQ(held(1).size(), 10U);
  request(0, 0);
  EXPECT_EQ(writer.pump(), 0U);
}

TEST_F(ledger_writer_test, grants_to_an_engine_as_to_training_under_its_own_name) {
  ledger_writer writer{view_};
  writer.give_back(writer.take(4, 2));
  writer.set_reserve(30);
  request(3, 6);
  request(4, 30);
  writer.pump();
  EXPECT_EQ(granted(3).chunks, 6U);
  EXPECT_EQ(granted(4).chunks, 4U) << "the reserve is kept from engines, too";
  EXPECT_EQ(writer.held_by(3), 6U);
  EXPECT_EQ(writer.owned_by(owner::engine), 10U);
  EXPECT_EQ(writer.owned_by(owner::training), 0U);
  for (auto const chunk : held(3)) {
    EXPECT_EQ(view_.chunk(chunk).who, owner::engine);
    EXPECT_EQ(view_.chunk(chunk).needs_scrub, chunk < 4) << "chunk " << chunk;
  }
  EXPECT_EQ(view_.header().bytes_to_engines.load(), 20_MiB);
  EXPECT_EQ(view_.header().bytes_to_training.load(), 0U);
}

TEST_F(ledger_writer_test, an_engines_lasting_memory_comes_from_the_end) {
  ledger_writer writer{view_};
  request(3, 2 | request_lasting);
  writer.pump();
  EXPECT_EQ(held(3), (std::vector<std::uint32_t>{chunks - 2, chunks - 1}));
}

TEST_F(ledger_writer_test, only_a_kind_with_commits_goes_before_what_an_acquisition_waits_for) {
  ledger_writer writer{view_};
  writer.set_wanted(chunks);
  request(0, 1 | request_before_demands);
  request(3, 1 | request_before_demands);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 1U);
  EXPECT_EQ(granted(3).chunks, 0U);
}

TEST_F(ledger_writer_test, who_has_waited_has_the_reserve_but_not_what_an_acquisition_waits_for) {
  ledger_writer writer{view_};
  writer.set_reserve(chunks);
  request(0, 1);
  request(3, 1 | request_beyond_reserve);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
  EXPECT_EQ(granted(3).chunks, 1U);
  writer.set_wanted(chunks - 3);
  request(0, 5 | request_beyond_reserve | request_lasting);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 2U);
}

TEST_F(ledger_writer_test, grants_nothing_to_a_server_or_to_a_kind_that_there_is_not) {
  view_.clients()[1].kind.store(77);
  ledger_writer writer{view_};
  request(1, 3);
  request(2, 3);
  writer.pump();
  EXPECT_EQ(granted(1).seq, 1U) << "it is answered all the same";
  EXPECT_EQ(granted(1).chunks, 0U);
  EXPECT_EQ(granted(2).chunks, 0U);
  EXPECT_EQ(writer.free_chunks(), chunks);
}

TEST_F(ledger_writer_test, takes_an_engines_release_only_in_its_epoch_and_from_itself) {
  ledger_writer writer{view_};
  request(3, 1);
  writer.pump();
  auto const chunk = held(3).front();
  auto const epoch = view_.chunk(chunk).epoch;
  mail(4, chunk, epoch);
  mail(0, chunk, epoch);
  mail(3, chunk, epoch - 1);
  EXPECT_EQ(writer.pump(), 0U);
  mail(3, chunk, epoch);
  EXPECT_EQ(writer.pump(), 1U);
  EXPECT_EQ(view_.chunk(chunk).who, owner::dirty);
  request(4, chunks);
  writer.pump();
  mail(3, chunk, epoch);
  EXPECT_EQ(writer.pump(), 0U) << "the chunk is the other engine's by now";
}

TEST_F(ledger_writer_test, demands_from_an_engine_and_reclaims_a_dead_one_beside_the_others) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  ledger_writer writer{view_};
  writer.set_bell(3, unique_fd{::dup(bell.get())});
  eventfd_t rung = 0;
  (void)::eventfd_read(bell.get(), &rung);
  for (std::uint32_t const slot : {0U, 3U, 4U}) {
    request(slot, 10);
  }
  writer.pump();
  (void)::eventfd_read(bell.get(), &rung);
  auto const number = writer.demand(3, 7);
  EXPECT_EQ(numbered::unpack(view_.controls()[3].demand.load()).chunks, 7U);
  EXPECT_EQ(numbered::unpack(view_.controls()[3].demand.load()).seq, number);
  EXPECT_EQ(::eventfd_read(bell.get(), &rung), 0) << "it is not woken";
  auto const was = held(3);
  EXPECT_EQ(writer.reclaim(3), 10U);
  EXPECT_EQ(numbered::unpack(view_.controls()[3].demand.load()).chunks, 0U);
  for (auto const chunk : was) {
    EXPECT_EQ(view_.chunk(chunk).who, owner::dirty);
  }
  EXPECT_EQ(writer.owned_by(owner::engine), 10U);
  EXPECT_EQ(writer.owned_by(owner::training), 10U);
  EXPECT_EQ(writer.owned_by(owner::dirty), 10U);
  EXPECT_EQ(writer.owned_by(owner::free), 10U);
}

TEST_F(ledger_writer_test, what_is_left_goes_to_an_engine_that_waits) {
  ledger_writer writer{view_};
  writer.leave(writer.take(chunks, 2), 2);
  view_.mailbox(4).waiting.store(1);
  EXPECT_EQ(writer.pump(), chunks);
  EXPECT_EQ(writer.left_chunks(), 0U);
  EXPECT_EQ(writer.owned_by(owner::serving), 0U);
}

TEST_F(ledger_writer_test, keeps_everything_for_a_reserve_larger_than_any_pool) {
  ledger_writer writer{view_};
  writer.set_reserve(0xffffffffU);
  writer.set_wanted(1);
  request(0, 1);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
  EXPECT_EQ(view_.header().grantable.load(), 0U);
}

TEST_F(ledger_writer_test, what_a_parked_tenant_needs_to_come_back_goes_to_no_other_tenant) {
  ledger_writer writer{view_};
  view_.mailbox(0).parked_chunks.store(25);
  request(1, chunks);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, chunks - 25);
  EXPECT_EQ(view_.header().grantable.load(), 0U);
  EXPECT_EQ(view_.header().grantable_to_parked.load(), 25U);
  request(3, 1);
  writer.pump();
  EXPECT_EQ(granted(3).chunks, 0U);
  request(0, 25 | request_whole | request_lasting);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 25U);
}

TEST_F(ledger_writer_test, a_server_takes_what_parked_tenants_need) {
  ledger_writer writer{view_};
  view_.mailbox(0).parked_chunks.store(25);
  EXPECT_EQ(writer.take(chunks, 2).size(), chunks);
}

TEST_F(ledger_writer_test, what_is_asked_for_whole_is_granted_whole_or_not_at_all) {
  ledger_writer writer{view_};
  view_.mailbox(0).parked_chunks.store(30);
  auto const serving = writer.take(15, 2);
  request(0, 30 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
  EXPECT_EQ(granted(0).seq, 1U) << "it has been answered";
  EXPECT_TRUE(held(0).empty());
  writer.give_back(serving);
  writer.set_wanted(11);  // a demand of the server's goes before
  request(0, 30 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
  writer.set_wanted(0);
  request(0, 30 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 30U);
}

/// Of a job that cannot go on; that in slot 1 is of normal priority.
class needed_memory_test : public ledger_writer_test {
 protected:
  void rank(std::uint32_t slot, priority rank, std::uint32_t least = 0) {
    view_.clients()[slot].rank.store(static_cast<std::uint32_t>(rank));
    view_.clients()[slot].least_chunks.store(least);
  }
  void need(std::uint32_t slot, std::uint32_t count, std::chrono::nanoseconds lasts) {
    show_need(view_.mailbox(slot), count, lasts);
  }
  static constexpr std::chrono::hours long_enough{1};
};

TEST_F(needed_memory_test, goes_to_no_job_of_lower_priority) {
  ledger_writer writer{view_};
  rank(0, priority::high);
  need(0, 25, long_enough);
  EXPECT_EQ(grantable_to(view_, 1), chunks - 25);
  EXPECT_EQ(grantable_to(view_, 0), chunks);
  request(1, chunks);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, chunks - 25);
  EXPECT_EQ(writer.missing_for(0), 0U);
  request(3, 5);
  writer.pump();
  EXPECT_EQ(granted(3).chunks, 5U) << "an engine's requests come first";
  EXPECT_EQ(writer.missing_for(0), 5U);
  request(0, 25);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 20U);
}

TEST_F(needed_memory_test, is_nothing_to_jobs_of_the_same_priority_or_a_higher_one) {
  ledger_writer writer{view_};
  need(0, 25, long_enough);
  request(1, 30);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 30U);
  rank(1, priority::high);
  request(1, chunks);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 10U);
}

TEST_F(needed_memory_test, leaves_others_their_minimum) {
  ledger_writer writer{view_};
  rank(0, priority::high);
  rank(1, priority::low, 10);
  need(0, chunks, long_enough);
  request(1, chunks);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 10U);
  request(1, chunks);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 0U);
}

TEST_F(needed_memory_test, is_nobodys_where_its_job_does_not_say_so_any_more_or_has_ended) {
  ledger_writer writer{view_};
  rank(0, priority::high);
  need(0, chunks, std::chrono::nanoseconds{-1});
  EXPECT_EQ(grantable_to(view_, 1), chunks);
  need(0, chunks, long_enough);
  EXPECT_EQ(grantable_to(view_, 1), 0U);
  withdraw_need(view_.mailbox(0));
  EXPECT_EQ(grantable_to(view_, 1), chunks);
  need(0, chunks, long_enough);
  view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::gone));
  EXPECT_EQ(grantable_to(view_, 1), chunks);
  EXPECT_FALSE(first_in_need(view_));
}

TEST_F(needed_memory_test, is_what_is_free_and_what_jobs_of_lower_priority_could_give) {
  ledger_writer writer{view_};
  rank(0, priority::high);
  rank(1, priority::low, 6);
  request(1, 20);
  request(3, 5);
  writer.pump();
  EXPECT_TRUE(could_have(view_, 0, 15 + 14));
  EXPECT_FALSE(could_have(view_, 0, 15 + 15)) << "of a minimum, or of an engine";
  view_.mailbox(1).kept_chunks.store(12);
  EXPECT_TRUE(could_have(view_, 0, 15 + 8));
  EXPECT_FALSE(could_have(view_, 0, 15 + 9)) << "it would have to be parked";
  EXPECT_TRUE(could_have(view_, 1, 15));
  EXPECT_FALSE(could_have(view_, 1, 16));
  rank(1, priority::high);
  EXPECT_FALSE(could_have(view_, 0, 16));
}

TEST_F(needed_memory_test, is_first_that_of_the_highest_priority) {
  need(0, 1, long_enough);
  EXPECT_EQ(first_in_need(view_), 0U);
  need(1, 1, long_enough);
  EXPECT_EQ(first_in_need(view_), 0U);
  rank(1, priority::high);
  EXPECT_EQ(first_in_need(view_), 1U);
  EXPECT_TRUE(outranks_another(view_, 1));
  EXPECT_FALSE(outranks_another(view_, 0));
  EXPECT_FALSE(outranks_another(view_, 3)) << "an engine";
  view_.mailbox(0).waiting.store(1);
  view_.mailbox(1).waiting.store(1);
  EXPECT_TRUE(waits_behind_another(view_, 0));
  EXPECT_FALSE(waits_behind_another(view_, 1)) << "which is in a later slot";
}

/// Of a tenant that is parked and waits.
class owed_memory_test : public ledger_writer_test {
 protected:
  void park(std::uint32_t slot, std::uint32_t count, std::int64_t owed_ns) {
    view_.mailbox(slot).parked_chunks.store(count);
    view_.mailbox(slot).looked_ns.store(monotonic_ns());
    view_.mailbox(slot).owed_ns.store(owed_ns);
  }
  [[nodiscard]] static std::int64_t later() { return monotonic_ns() + 3'600'000'000'000; }
};

TEST_F(owed_memory_test, is_kept_from_the_server_from_then_on_and_not_before) {
  ledger_writer writer{view_};
  park(0, 25, later());
  EXPECT_EQ(writer.available_chunks(), chunks);
  EXPECT_EQ(writer.owed_to(0), 0U);
  park(0, 25, monotonic_ns());
  EXPECT_EQ(writer.available_chunks(), chunks - 25);
  EXPECT_EQ(writer.owed_to(0), 25U);
  EXPECT_EQ(writer.owed_to(1), 0U);
}

TEST_F(owed_memory_test, is_granted_beyond_what_is_reserved_or_wanted) {
  ledger_writer writer{view_};
  writer.set_reserve(20);
  writer.set_wanted(10);
  park(0, 25, later());
  request(0, 25 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 0U);
  park(0, 25, monotonic_ns());
  request(0, 25 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 25U);
}

TEST_F(owed_memory_test, is_kept_from_others_that_are_parked_and_not_owed_yet) {
  ledger_writer writer{view_};
  park(0, 25, monotonic_ns());
  park(1, 20, later());
  request(1, 20 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 0U) << "15 are not owed";
  request(0, 25 | request_whole);
  writer.pump();
  EXPECT_EQ(granted(0).chunks, 25U);
}

TEST_F(owed_memory_test, is_missing_as_far_as_it_is_not_free) {
  ledger_writer writer{view_};
  EXPECT_FALSE(writer.next_owed());
  auto const serving = writer.take(30, 2);
  auto const at = later();
  park(0, 25, at);
  park(1, 5, at + 7);
  auto const next = writer.next_owed();
  ASSERT_TRUE(next);
  EXPECT_EQ(next->slot, 0U);
  EXPECT_EQ(next->at_ns, at);
  EXPECT_EQ(next->missing, 15U);
  park(1, 5, monotonic_ns());
  EXPECT_EQ(writer.next_owed()->slot, 0U) << "what the other is owed is free";
  EXPECT_EQ(writer.next_owed()->missing, 20U) << "and is not there for the first";
  writer.give_back(serving);
  EXPECT_FALSE(writer.next_owed());
}

TEST_F(owed_memory_test, that_has_been_granted_is_owed_no_more) {
  ledger_writer writer{view_};
  auto const owed_ns = monotonic_ns();
  park(0, 25, owed_ns);
  request(0, 25 | request_whole);
  writer.pump();
  ASSERT_EQ(granted(0).chunks, 25U);
  EXPECT_EQ(writer.available_chunks(), chunks - 25) << "of what is left nothing is";
  EXPECT_FALSE(writer.next_owed());
  park(0, 25, owed_ns + 1);  // it has been away once more
  EXPECT_TRUE(writer.next_owed());
}

TEST_F(owed_memory_test,
       of_the_stopped_or_the_dead_keeps_nobody_waiting_nor_more_than_there_is_of_the_damaged) {
  ledger_writer writer{view_};
  park(0, 25, monotonic_ns());
  view_.mailbox(0).looked_ns.store(monotonic_ns() - 60'000'000'000);
  EXPECT_EQ(writer.available_chunks(), chunks);
  park(0, 0xffffffffU, monotonic_ns());
  park(1, 0xffffffffU, monotonic_ns());
  EXPECT_EQ(writer.available_chunks(), 0U);
  EXPECT_EQ(writer.owed_to(0), chunks);
  view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::gone));
  view_.clients()[1].status.store(static_cast<std::uint32_t>(client_status::gone));
  EXPECT_EQ(writer.available_chunks(), chunks);
}

TEST_F(ledger_writer_test, what_the_dead_or_the_damaged_say_they_need_keeps_nobody_out) {
  ledger_writer writer{view_};
  view_.mailbox(0).parked_chunks.store(0xffffffffU);
  view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::gone));
  request(1, 4);
  writer.pump();
  EXPECT_EQ(granted(1).chunks, 4U);
  view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::live));
  writer.pump();
  EXPECT_EQ(view_.header().grantable.load(), 0U);
}

TEST_F(ledger_writer_test, takes_all_there_is_when_more_is_wanted_than_any_pool_has) {
  ledger_writer writer{view_};
  EXPECT_EQ(writer.take(0xffffffffU, 2).size(), chunks);
}

}  // namespace
}  // namespace sluice::memhandover
