#include "memhandover/ledger/client_entries.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "memhandover/base/bytes.hpp"
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
  mailbox.request.store(7);
  mailbox.mail_written.store(8);
  mailbox.demand_done.store(9);
  ASSERT_NE(describe_pool(view)["clients"][0], fresh);

  write_client(view, 0, {client_kind::training, this_process(), 0, "first", ""});
  EXPECT_EQ(describe_pool(view)["clients"][0], fresh);
  EXPECT_EQ(fresh["discarded_us"], 0);
  EXPECT_EQ(mailbox.released_ns, 0);
  EXPECT_EQ(mailbox.live_chunks, 0);
  // By these the writer knows what it has read.
  EXPECT_EQ(mailbox.request, 7);
  EXPECT_EQ(mailbox.mail_written, 8);
  EXPECT_EQ(mailbox.demand_done, 9);
}

}  // namespace
}  // namespace sluice::memhandover
