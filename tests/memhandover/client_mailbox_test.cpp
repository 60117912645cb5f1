#include "memhandover/ledger/client_mailbox.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <array>
#include <atomic>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/ledger_writer.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using indices = std::vector<std::uint32_t>;

constexpr std::uint32_t pool_chunks = 12;

class client_mailbox_test : public testing::Test {
 protected:
  void SetUp() override {
    view_.clients()[0].kind.store(static_cast<std::uint32_t>(client_kind::training));
    view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::live));
  }
  /// As if a writer had granted these chunks and died before it said how many.
  void grant_half(indices const& chunks) {
    for (auto const chunk : chunks) {
      auto const before = view_.chunk(chunk);
      view_.chunks()[chunk].store(
          chunk_state{owner::training, before.who == owner::dirty, 0, before.epoch + 1}.pack());
    }
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, pool_chunks});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
  client_mailbox mailbox_{view_, 0};
};

TEST_F(client_mailbox_test, collects_what_it_asked_for_once) {
  ledger_writer writer{view_};
  mailbox_.ask(3, lifetime::lasting);
  EXPECT_FALSE(mailbox_.answered());
  writer.pump();
  EXPECT_TRUE(mailbox_.answered());
  EXPECT_EQ(mailbox_.collect(3), (indices{9, 10, 11}));
  EXPECT_TRUE(mailbox_.collect(3).empty());
}

TEST_F(client_mailbox_test, a_commit_is_granted_what_is_kept_for_the_server) {
  ledger_writer writer{view_};
  writer.set_reserve(2);
  writer.set_wanted(pool_chunks);
  mailbox_.ask(3, lifetime::lasting);
  writer.pump();
  EXPECT_TRUE(mailbox_.answered());
  EXPECT_TRUE(mailbox_.collect(3).empty());
  mailbox_.ask(3, lifetime::lasting, precedence::before_demands);
  writer.pump();
  EXPECT_TRUE(mailbox_.answered());
  EXPECT_EQ(mailbox_.collect(3), (indices{9, 10, 11}));
}

TEST_F(client_mailbox_test, gives_back_what_two_writers_granted_for_one_request) {
  mailbox_.ask(3, lifetime::revocable);
  grant_half({10, 11});
  ledger_writer successor{view_};
  successor.pump();
  EXPECT_EQ(successor.held_by(0), 5U);
  EXPECT_EQ(mailbox_.collect(3).size(), 3U);
  EXPECT_TRUE(mailbox_.has_mail());
  successor.pump();
  EXPECT_FALSE(mailbox_.has_mail());
  EXPECT_EQ(successor.held_by(0), 3U);
}

TEST_F(client_mailbox_test, gives_back_what_comes_after_the_request_was_withdrawn) {
  mailbox_.ask(2, lifetime::revocable);
  mailbox_.withdraw();
  EXPECT_TRUE(mailbox_.collect(2).empty());
  grant_half({4, 5});  // by a writer that had read the request before
  EXPECT_FALSE(mailbox_.resolve()) << "the writer may still be granting";
  ledger_writer writer{view_};
  writer.pump();
  EXPECT_TRUE(mailbox_.resolve());
  writer.pump();
  EXPECT_EQ(writer.free_chunks(), pool_chunks);
  EXPECT_FALSE(mailbox_.resolve());
}

TEST_F(client_mailbox_test, tells_which_chunks_hold_old_contents) {
  ledger_writer writer{view_};
  writer.give_back(writer.take(2, 7));
  mailbox_.ask(pool_chunks, lifetime::revocable);
  writer.pump();
  indices dirty;
  EXPECT_EQ(mailbox_.collect(pool_chunks, &dirty).size(), pool_chunks);
  EXPECT_EQ(dirty, (indices{0, 1}));
}

TEST_F(client_mailbox_test, an_engine_collects_and_releases_what_is_its_own) {
  view_.clients()[0].kind.store(static_cast<std::uint32_t>(client_kind::engine));
  ledger_writer writer{view_};
  mailbox_.ask(3, lifetime::lasting, precedence::before_demands);
  writer.pump();
  auto const mine = mailbox_.collect(3);
  EXPECT_EQ(mine, (indices{9, 10, 11}));
  EXPECT_EQ(view_.chunk(9).who, owner::engine);
  mailbox_.release(std::array{10U});
  EXPECT_EQ(writer.pump(), 1U);
  EXPECT_EQ(writer.owned_by(owner::engine), 2U);
}

TEST_F(client_mailbox_test, releases_a_chunk_once_and_only_its_own) {
  ledger_writer writer{view_};
  mailbox_.ask(1, lifetime::revocable);
  writer.pump();
  auto const mine = mailbox_.collect(1);
  mailbox_.release(std::array{pool_chunks - 1});
  EXPECT_FALSE(mailbox_.has_mail());
  mailbox_.release(mine);
  mailbox_.release(mine);
  EXPECT_EQ(view_.mailbox(0).mail_written.load(), 1U);
}

/// Client and writer pass each other: one says that it waits and then looks, the other makes room
/// and then looks who waits. One of them must see the other, or the client sleeps beside free
/// memory.
TEST_F(client_mailbox_test, a_waiting_client_finds_memory_or_is_rung) {
#ifdef __SANITIZE_THREAD__
  constexpr int rounds = 5'000;
#else
  constexpr int rounds = 100'000;
#endif
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  ledger_writer writer{view_};
  writer.set_bell(0, unique_fd{::dup(bell.get())});
  std::atomic<int> round{0};
  std::atomic<int> done{0};
  std::atomic<bool> found{false};
  std::thread client{[&] {
    for (int i = 1; i <= rounds; ++i) {
      while (round.load() < i) {
        (void)mailbox_.grantable();  // so that the look below does not wait for the cache
      }
      mailbox_.set_waiting(true);
      found.store(mailbox_.grantable() > 0, std::memory_order_relaxed);
      done.store(i);
    }
  }};
  int missed = 0;
  for (int i = 1; i <= rounds; ++i) {
    mailbox_.set_waiting(false);
    writer.set_reserve(pool_chunks);
    eventfd_t rung = 0;
    (void)::eventfd_read(bell.get(), &rung);
    rung = 0;
    round.store(i);
    for (int delay = i % 64; delay > 0; --delay) {
      (void)done.load();
    }
    writer.set_reserve(0);
    while (done.load() < i) {
    }
    missed += !found.load() && ::eventfd_read(bell.get(), &rung) != 0 ? 1 : 0;
  }
  client.join();
  EXPECT_EQ(missed, 0);
}

}  // namespace
}  // namespace sluice::memhandover
