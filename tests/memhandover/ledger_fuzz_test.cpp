/// Random damage to a pool's shared memory, read by all that read it. SLUICE_TEST_INPUTS sets how
/// many damaged pools there are; one in eight of them is also described as JSON.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "damaged_pool.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "memhandover/ledger/pool_status.hpp"
#include "random_runs.hpp"
#include "tests/from_environment.hpp"

namespace sluice::memhandover::trials {
namespace {

/// The longest message over the pool's socket (wire.cpp), less what the message adds.
constexpr std::size_t message_bytes = (128U << 10U) - 100;

char const* owner_name(std::uint64_t word) {
  switch (word & 0xffU) {
    case 0:
      return "free";
    case 1:
      return "dirty";
    case 2:
      return "training";
    case 3:
      return "serving";
    case 4:
      return "engine";
    default:
      return "unknown";
  }
}

char const* kind_name(std::uint32_t word) {
  return word == 1 ? "training" : word == 2 ? "server" : word == 3 ? "engine" : "unknown";
}

/// The slot that owns a chunk, as a chunk's word alone tells; `max_clients` for none.
std::uint32_t slot_of(std::uint64_t word) {
  auto const who = word & 0xffU;
  auto const slot = static_cast<std::uint32_t>(word >> 16U & 0xffffU);
  return who >= 2 && who <= 4 ? std::min(slot, max_clients) : max_clients;
}

class damaged_reader {
 public:
  damaged_reader(ledger_view const& view, std::mt19937_64& random) : view_(view), random_(random) {}

  void describe() {
    describe_status();
    describe_all_chunks();
  }
  void read() {
    ASSERT_EQ(view_.shape().chunk_count, count());
    auto const slot = below(random_, max_clients);
    auto const ring = view_.mail_ring(slot);
    ASSERT_GE(ring.size(), count());
    std::uint64_t seen = ring.front().load() ^ ring.back().load();
    for (std::uint32_t chunk = 0; chunk < count(); ++chunk) {
      seen += chunk_note(view_, slot, chunk).size();
    }
    seen += static_cast<std::uint64_t>(view_.note_texts(slot).back().text[47]);
    seen += view_.controls()[slot].demand.load() + view_.writer_slot();
    sink_ = seen;
  }
  void write() {
    ledger_writer writer{view_};
    check_free(writer, "a new writer");
    writer.set_reserve(random_() % 4 == 0 ? static_cast<std::uint32_t>(random_()) : 1);
    writer.set_wanted(random_() % 4 == 0 ? static_cast<std::uint32_t>(random_()) : 0);
    writer.pump();
    check_free(writer, "mail and requests");
    auto const server = static_cast<std::uint16_t>(below(random_, max_clients));
    auto const taken =
        writer.take(static_cast<std::uint32_t>(random_() % 2 == 0 ? 3 : random_()), server);
    ASSERT_EQ(std::set<std::uint32_t>(taken.begin(), taken.end()).size(), taken.size());
    check_free(writer, "a take");
    auto back = taken;
    back.push_back(static_cast<std::uint32_t>(random_()));
    writer.give_back(back);
    check_free(writer, "a return");
    auto const slot = below(random_, max_clients);
    writer.demand(slot, static_cast<std::uint32_t>(random_()));
    client_mailbox client{view_, slot};
    client.ask(static_cast<std::uint32_t>(random_() % 2 == 0 ? 2 : random_()),
               random_() % 2 == 0 ? lifetime::revocable : lifetime::lasting);
    auto const mine = client.collect(static_cast<std::uint32_t>(random_() % 4));
    writer.pump();
    client.release(mine);
    client.withdraw();
    writer.pump();
    client.resolve();
    check_free(writer, "a client's turn");
    writer.reclaim(slot);
    ASSERT_EQ(writer.held_by(slot), 0U);
    check_free(writer, "a reclaim");
  }

 private:
  [[nodiscard]] std::uint32_t count() const { return view_.header().chunk_count; }
  [[nodiscard]] std::uint64_t word(std::uint32_t chunk) const {
    return view_.chunks()[chunk].load();
  }

  void describe_status() {
    auto const status = describe_pool(view_);
    ASSERT_LE(status.dump().size(), message_bytes);
    std::uint64_t sum = 0;
    for (auto const* field :
         {"free_bytes", "dirty_bytes", "training_bytes", "serving_bytes", "engine_bytes"}) {
      sum += status.at("pool").at(field).get<std::uint64_t>();
    }
    std::uint64_t known = 0;
    for (std::uint32_t i = 0; i < count(); ++i) {
      known += (word(i) & 0xffU) <= 4 ? view_.header().chunk_bytes : 0;
    }
    ASSERT_EQ(sum, known);
    for (auto const& client : status.at("clients")) {
      auto const word = view_.clients()[client.at("slot")].kind.load();
      ASSERT_EQ(client.at("kind").get_ref<std::string const&>(), kind_name(word));
      ASSERT_EQ(client.contains("holdings"), word == 3);
      std::uint64_t told = 0;
      for (auto const& each : client.value("holdings", nlohmann::json::array())) {
        told += each.at("bytes").get<std::uint64_t>();
      }
      ASSERT_LE(told, client.at("bytes").get<std::uint64_t>());
    }
  }

  /// Pages through the chunks and checks each page against the words.
  void describe_all_chunks() {
    auto const page = 1 + below(random_, 500);
    std::uint32_t chunk = 0;
    for (std::uint32_t pages = 0;; ++pages) {
      ASSERT_LE(pages, count()) << "the pages do not end";
      auto const shown = describe_chunks(view_, chunk, page);
      ASSERT_LE(shown.dump().size(), message_bytes / 500 * page + 50);
      for (auto const& run : shown.at("runs")) {
        ASSERT_EQ(run.at("first"), chunk);
        auto const end = chunk + run.at("count").get<std::uint32_t>();
        ASSERT_LE(end, count());
        for (; chunk < end; ++chunk) {
          ASSERT_EQ(run.at("owner").get_ref<std::string const&>(), owner_name(word(chunk)));
          ASSERT_EQ(run.value("slot", max_clients), slot_of(word(chunk)));
        }
      }
      if (shown.at("next").is_null()) {
        break;
      }
      ASSERT_EQ(shown.at("next"), chunk);
    }
    ASSERT_EQ(chunk, count());
    auto const beyond =
        describe_chunks(view_, static_cast<std::uint32_t>(random_()) | 0x8000'0000U, page);
    ASSERT_TRUE(beyond.at("runs").empty() && beyond.at("next").is_null());
  }

  void check_free(ledger_writer const& writer, char const* after) {
    std::uint32_t free = 0;
    for (std::uint32_t i = 0; i < count(); ++i) {
      free += (word(i) & 0xffU) <= 1 ? 1 : 0;
    }
    ASSERT_EQ(writer.free_chunks(), free) << "after " << after;
    ASSERT_LE(view_.header().grantable.load(), free) << "after " << after;
  }

  ledger_view const& view_;
  std::mt19937_64& random_;
  std::uint64_t volatile sink_ = 0;  ///< so that no read is left out
};

/// Reads all of an open pool. Its descriptions take ten times as long as all the rest, so one input
/// in eight is described; of these some again after the writer has worked on them.
void read_all(ledger_view const& view, std::mt19937_64& random) {
  damaged_reader reader{view, random};
  bool const described = random() % 8 == 0;
  if (described) {
    reader.describe();
  }
  reader.read();
  reader.write();
  if (described && random() % 4 == 0) {
    reader.describe();
  }
}

/// Opens the pool and reads it; what was to be refused must be refused with its reason.
void try_pool(damaged_pool const& pool, std::mt19937_64& random) {
  auto const expected = pool.refusal();
  try {
    ledger_view const view{pool.ledger_fd(), pool.mailroom_fd(),
                           shared_segment::access::read_write};
    ASSERT_FALSE(expected) << "was opened although: " << *expected;
    read_all(view, random);
  } catch (error const& why) {
    ASSERT_TRUE(expected) << why.what();
    ASSERT_EQ(why.kind(), error_kind::internal);
    ASSERT_NE(std::string{why.what()}.find(*expected), std::string::npos)
        << why.what() << "; expected: " << *expected;
  }
}

/// A pool that is damaged while somebody has it open; only what makes it new is opened anew.
struct open_pool {
  open_pool(std::uint32_t chunk_count, pool_use use)
      : pool(chunk_count, use),
        view(pool.ledger_fd(), pool.mailroom_fd(), shared_segment::access::read_write) {}

  damaged_pool pool;
  ledger_view view;
};

TEST(ledger_fuzz, no_damage_to_shared_memory_crashes_or_deceives_its_readers) {
  auto const all = seeds();
  auto const inputs = from_environment("SLUICE_TEST_INPUTS", 150'000);
  std::vector<std::unique_ptr<open_pool>> pools;
  for (auto const use :
       {pool_use::unused, pool_use::training, pool_use::serving, pool_use::engines}) {
    pools.push_back(std::make_unique<open_pool>(5, use));
    pools.push_back(std::make_unique<open_pool>(20, use));
  }
  auto const quick = pools.size();
  pools.push_back(std::make_unique<open_pool>(70, pool_use::crowded));  // 20 times the work
  pools.push_back(std::make_unique<open_pool>(600, pool_use::serving));
  std::uint64_t refused = 0;
  auto const start = std::chrono::steady_clock::now();
  for (auto const seed : all) {
    std::mt19937_64 random{seed};
    for (std::uint64_t i = 0; i < inputs / all.size(); ++i) {
      auto& [pool, view] = *pools[below(random, random() % 64 == 0 ? pools.size() : quick)];
      pool.damage(random);
      if (pool.opens_as_before() && random() % 16 != 0) {
        read_all(view, random);
      } else {
        refused += pool.refusal() ? 1 : 0;
        try_pool(pool, random);
      }
      if (::testing::Test::HasFatalFailure()) {
        FAIL() << "with SLUICE_TEST_SEED=" << seed << ", input " << i;
      }
    }
  }
  std::chrono::duration<double> const took = std::chrono::steady_clock::now() - start;
  std::cout << inputs << " inputs in " << took.count() << " s, " << refused << " refused\n";
  EXPECT_GT(refused, inputs / 100);
  EXPECT_LT(refused, inputs / 4);
}

}  // namespace
}  // namespace sluice::memhandover::trials
