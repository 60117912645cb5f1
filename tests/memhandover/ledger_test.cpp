#include "memhandover/ledger/ledger.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/client_kinds.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr pool_shape shape{backend_kind::host, -1, 2_MiB, 100};

TEST(ledger, of_a_new_pool_has_only_free_chunks_and_the_broker_as_writer) {
  auto const files = create_ledger(shape);
  ledger_view const view{files.ledger.get(), files.mailroom.get(),
                         shared_segment::access::read_only};
  EXPECT_EQ(view.shape().chunk_count, 100U);
  EXPECT_EQ(view.writer_slot(), broker_slot);
  for (std::uint32_t i = 0; i < 100; ++i) {
    EXPECT_EQ(view.chunk(i).who, owner::free);
  }
  EXPECT_GE(view.mail_ring(0).size(), 100U);
}

TEST(ledger, cannot_be_written_through_a_read_only_descriptor) {
  auto const files = create_ledger(shape);
  auto const reader = reopen_read_only(files.ledger.get());
  EXPECT_THROW(
      (ledger_view{reader.get(), files.mailroom.get(), shared_segment::access::read_write}), error);
}

TEST(ledger, cannot_be_shrunk_under_its_readers) {
  auto const files = create_ledger(shape);
  EXPECT_NE(::ftruncate(files.ledger.get(), 16), 0);
  EXPECT_NE(::ftruncate(files.mailroom.get(), 16), 0);
}

/// Every byte of the header's constant part, changed one at a time, makes the ledger unusable with
/// a sentence.
TEST(ledger, that_was_damaged_is_an_error_and_never_a_crash) {
  auto const files = create_ledger(shape);
  shared_segment const raw{files.ledger.get(), shared_segment::access::read_write};
  for (std::size_t i = 0; i < offsetof(ledger_header, writer) - 8; ++i) {
    auto const before = raw.data()[i];
    raw.data()[i] ^= std::byte{0x10};
    if (i < offsetof(ledger_header, checksum) + 8) {
      EXPECT_THROW((ledger_view{files.ledger.get(), files.mailroom.get(),
                                shared_segment::access::read_only}),
                   error)
          << "byte " << i;
    }
    raw.data()[i] = before;
  }
  EXPECT_NO_THROW(
      (ledger_view{files.ledger.get(), files.mailroom.get(), shared_segment::access::read_only}));
}

TEST(ledger, names_both_versions_when_they_differ) {
  auto const files = create_ledger(shape);
  shared_segment const raw{files.ledger.get(), shared_segment::access::read_write};
  reinterpret_cast<ledger_header*>(raw.data())->version = 77;
  try {
    ledger_view const view{files.ledger.get(), files.mailroom.get(),
                           shared_segment::access::read_only};
    FAIL();
  } catch (error const& why) {
    EXPECT_NE(std::string{why.what()}.find("version 77"), std::string::npos) << why.what();
  }
}

TEST(ledger, an_empty_or_foreign_file_is_refused) {
  auto const files = create_ledger(shape);
  unique_fd const empty{::memfd_create("empty", MFD_CLOEXEC)};
  EXPECT_THROW((ledger_view{empty.get(), files.mailroom.get(), shared_segment::access::read_only}),
               error);
  EXPECT_THROW(
      (ledger_view{files.mailroom.get(), files.ledger.get(), shared_segment::access::read_only}),
      error);
}

TEST(chunk_state, survives_packing) {
  for (auto const who : {owner::training, owner::serving, owner::engine}) {
    chunk_state const state{who, true, 31, 0xfedcba98U};
    auto const again = chunk_state::unpack(state.pack());
    EXPECT_EQ(again.who, state.who);
    EXPECT_EQ(again.needs_scrub, state.needs_scrub);
    EXPECT_EQ(again.client, state.client);
    EXPECT_EQ(again.epoch, state.epoch);
  }
}

TEST(chunk_state, is_somebodys_or_free_or_damaged) {
  for (unsigned word = 0; word < 256; ++word) {
    auto const state = chunk_state::unpack(word);
    EXPECT_EQ(state.is_free(), word < 2) << word;
    EXPECT_EQ(is_owned(state.who), word >= 2 && word < owner_count) << word;
    EXPECT_EQ(is_tenants(state.who), word == 2 || word == 4) << word;
  }
}

TEST(client_kinds, are_told_by_word_and_by_name) {
  for (auto const& each : client_kinds) {
    EXPECT_EQ(&traits_of(each.kind), &each);
    EXPECT_EQ(&kind_named(each.name), &each);
    EXPECT_STREQ(name_of_kind(static_cast<std::uint32_t>(each.kind)), each.name);
    EXPECT_TRUE(is_owned(each.owns));
    EXPECT_EQ(is_tenants(each.owns), each.is_tenant);
    EXPECT_EQ(each.granted_bytes != nullptr, each.is_tenant);
  }
  EXPECT_STREQ(name_of_kind(0), "unknown");
  EXPECT_STREQ(name_of_kind(4), "unknown");
}

TEST(client_kinds, that_nobody_knows_are_refused_with_those_that_there_are) {
  for (auto const* name : {"", "trainer", "serving", "engine\n"}) {
    try {
      (void)kind_named(name);
      ADD_FAILURE() << name;
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::invalid_argument);
      EXPECT_NE(std::string{why.what()}.find("training, server, engine"), std::string::npos)
          << why.what();
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
