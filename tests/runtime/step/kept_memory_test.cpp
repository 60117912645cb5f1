/// What a job keeps of its memory, and what goes to others: at once, before the first micro-batch, and while something lives
/// on.

#include <gtest/gtest.h>
#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "tests/from_environment.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test::kept_memory {
namespace {

using namespace std::chrono_literals;
using memhandover::client_kind;
using memhandover::demand;
using memhandover::demand_answer;
using memhandover::tenant_client;
using std::chrono::steady_clock;

constexpr std::uint32_t pool_chunks = 96;
/// That a job has before its first micro-batch, and frees.
constexpr std::uint32_t preparation = 24;

/// A job in a pool.
class one_job_test : public testing::Test {
 protected:
  one_job_test() {
    world_.start_broker();
    join();
  }

  step::training_memory& join() {
    auto options = world_.job();
    options.gate = &gate_;
    return memory_.emplace(options);
  }
  void commit(bool outlived = false) {
    EXPECT_EQ(memory_->commit_begin(false), step::commit_start::begun);
    memory_->commit_end(outlived);
  }

  fault_world world_{"cuda", pool_chunks};
  idle_gate gate_;
  std::optional<step::training_memory> memory_;
};

TEST_F(one_job_test, what_a_discarded_micro_batch_has_not_freed_yet_goes_to_a_demand_at_once) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  auto const server = world_.join_server();
  memory.begin();
  auto* const held = memory.allocate_arena((pool_chunks - 1) * chunk);
  auto* const unbacked = memory.allocate_arena(2 * chunk);
  ASSERT_EQ(memory.state(), step::arena_state::starved);
  memory.discard();

  auto const given =
      server->acquire_chunks(pool_chunks / 2, steady_clock::now() + patience, nullptr);

  EXPECT_EQ(given.size(), pool_chunks / 2);
  server->give_back_chunks(given);
  EXPECT_TRUE(memory.free(held));
  EXPECT_TRUE(memory.free(unbacked));
  memory.begin();
  auto* const all = memory.allocate_arena(pool_chunks * chunk);
  EXPECT_EQ(memory.state(), step::arena_state::sound) << "some chunks are lost";
  commit();
  EXPECT_TRUE(memory.free(all));
}

/// Waits until so many of the pool's chunks are free, in vain at most for a while; returns how many are.
std::uint32_t await_free(step::training_memory& memory, std::uint32_t wanted) {
  auto const& view = memory.client().view();
  auto const until = steady_clock::now() + patience;
  for (;;) {
    std::uint32_t free = 0;
    for (std::uint32_t chunk = 0; chunk < view.shape().chunk_count; ++chunk) {
      free += view.chunk(chunk).is_free() ? 1 : 0;
    }
    if (free == wanted || steady_clock::now() > until) {
      return free;
    }
    std::this_thread::yield();
  }
}

TEST_F(one_job_test, persistent_memory_grows_by_what_the_arena_does_not_use) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  auto const micro_batch = [&](std::uint32_t chunks) {
    memory.begin();
    auto* const held = memory.allocate_arena(chunks * chunk);
    commit();
    return held;
  };

  EXPECT_TRUE(memory.free(micro_batch(40)));
  auto* const lasts = memory.allocate_persistent(10 * chunk);
  EXPECT_EQ(await_free(memory, pool_chunks - 40), pool_chunks - 40);

  auto* const cached = micro_batch(40);  // as torch keeps its segments for the next one
  auto* const more = memory.allocate_persistent(5 * chunk);
  EXPECT_EQ(await_free(memory, pool_chunks - 55), pool_chunks - 55);
  for (auto* const each : {lasts, cached, more}) {
    EXPECT_TRUE(memory.free(each));
  }
}

/// Whether a job that waits has given up what it does not use, beside a client that came before it and says that it waits;
/// `dies`: and that has gone without another word.
bool gives_way_to(client_kind kind, bool dies) {
  fault_world world{"host"};
  world.start_broker();
  auto earlier = tenant_client::join(world.broker(), kind, "earlier",
                                     [](demand const& /*what*/) { return demand_answer{}; });
  step::training_memory job{world.job()};
  auto const place = earlier->slot();
  EXPECT_LT(place, job.client().slot());
  earlier->mailbox().waiting.store(1);
  auto const& view = job.client().view();
  if (dies) {
    earlier.reset();
    auto const until = steady_clock::now() + patience;
    while (memhandover::has_status(view.clients()[place], memhandover::client_status::live)) {
      EXPECT_LT(steady_clock::now(), until) << "nobody has noticed its end";
      std::this_thread::yield();
    }
    EXPECT_EQ(view.mailbox(place).waiting.load(), 1U);
  }
  auto const chunk = world.broker().chunk_bytes;
  job.begin();
  EXPECT_TRUE(job.free(job.allocate_arena(8 * chunk)));
  job.discard();
  auto const given = job.client().mailbox().mail_written.load();
  EXPECT_FALSE(job.wait_capacity(view.shape().bytes() + chunk, 1ms));
  return job.client().mailbox().mail_written.load() != given;
}

TEST(waiting_job_test, gives_way_to_an_earlier_job_that_waits_and_to_nobody_else) {
  EXPECT_TRUE(gives_way_to(client_kind::training, false));
  EXPECT_FALSE(gives_way_to(client_kind::training, true));
  EXPECT_FALSE(gives_way_to(client_kind::engine, false));
}

TEST_F(one_job_test, what_is_freed_below_what_lasts_is_shown) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  auto const& shown = memory.client().mailbox();
  auto* const below = memory.allocate_persistent(3 * chunk);
  auto* const above = memory.allocate_persistent(chunk);
  ASSERT_TRUE(memory.free(below));
  memory.publish_stranded();
  EXPECT_EQ(shown.stranded_chunks, 3U);
  EXPECT_EQ(shown.kept_chunks, 4U);
  ASSERT_TRUE(memory.free(above));
  memory.publish_stranded();
  EXPECT_EQ(shown.stranded_chunks, 0U);
  EXPECT_EQ(shown.kept_chunks, 0U);
}

TEST_F(one_job_test, what_has_served_to_set_it_up_goes_from_below_what_lasts) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  auto* const first = memory.allocate_persistent(chunk / 2);
  auto* const prepared = memory.allocate_persistent(preparation * chunk);
  auto* const lasts = memory.allocate_persistent(2 * chunk);
  EXPECT_TRUE(memory.free(prepared));

  memory.begin();
  EXPECT_EQ(await_free(memory, pool_chunks - 4), pool_chunks - 4);
  auto* const held = memory.allocate_arena((pool_chunks - 4) * chunk);
  EXPECT_EQ(memory.state(), step::arena_state::sound);
  commit();
  EXPECT_TRUE(memory.free(held));

  EXPECT_EQ(memory.persistent_range(lasts + chunk), std::pair(lasts, 2 * chunk));
  EXPECT_EQ(memory.persistent_range(prepared).first, nullptr);
  auto* const more = memory.allocate_persistent(chunk);
  EXPECT_EQ(memory.persistent_range(more), std::pair(more, chunk));
  std::memset(more, 1, chunk);
  std::memset(lasts, 2, 2 * chunk);
  for (auto* const each : {lasts, first, more}) {
    EXPECT_TRUE(memory.owns(each));
    EXPECT_TRUE(memory.free(each));
  }
  EXPECT_FALSE(memory.owns(lasts));
}

TEST_F(one_job_test, another_thread_allocates_while_it_begins_its_first_micro_batch) {
  auto const jobs = static_cast<std::uint32_t>(repeated(30, 6));
  constexpr std::uint32_t more = preparation + 2;  // than what is freed before
  auto const chunk = world_.broker().chunk_bytes;
  for (std::uint32_t job = 0; job < jobs; ++job) {
    memory_.reset();
    auto& memory = join();
    auto* const prepared = memory.allocate_persistent(preparation * chunk);
    auto* const lasts = job % 2 == 0 ? memory.allocate_persistent(chunk) : nullptr;
    EXPECT_TRUE(memory.free(prepared));
    std::byte* other = nullptr;
    std::atomic<bool> under_way{false};
    std::thread allocating{[&] {
      under_way = true;
      other = memory.allocate_persistent(more * chunk);
    }};
    while (!under_way) {
      std::this_thread::yield();
    }
    for (std::uint32_t i = 0; i < 100 * job; ++i) {
      _mm_pause();
    }
    memory.begin();
    memory.discard();
    allocating.join();
    EXPECT_EQ(memory.client().mailbox().persistent_chunks, more + (lasts != nullptr ? 1 : 0));
    std::memset(other, 1, more * chunk);
    EXPECT_TRUE(memory.free(other));
    EXPECT_TRUE(lasts == nullptr || memory.free(lasts));
  }
}

/// A job beside another that has all of the pool.
class job_beside_another : public one_job_test {
 protected:
  void SetUp() override {
    other_->ask(pool_chunks, memhandover::lifetime::lasting, steady_clock::now() + patience);
    all_ = other_->collect();
    ASSERT_EQ(all_.size(), pool_chunks);
  }

  void expect_found(std::future<std::byte*>& allocating) {
    std::byte* found = nullptr;
    EXPECT_NO_THROW(found = allocating.get());
    EXPECT_TRUE(found != nullptr && memory_->free(found));
  }

  std::future<std::byte*> allocate() {
    return std::async(std::launch::async,
                      [this] { return memory_->allocate_persistent(world_.broker().chunk_bytes); });
  }

  std::unique_ptr<tenant_client> other_ =
      tenant_client::join(world_.broker(), client_kind::training, "other",
                          [](demand const& /*what*/) { return demand_answer{}; });
  std::vector<std::uint32_t> all_;
};

TEST_F(job_beside_another, is_not_told_that_there_is_no_memory_while_nobody_answers) {
  auto const broker = memhandover::broker_pid(world_.folder());
  ASSERT_GT(broker, 0);
  ASSERT_EQ(::kill(broker, SIGSTOP), 0);  // as one that is being started on a busy machine
  other_->release(all_);
  auto allocating = allocate();
  // Longer than what may be on its way is waited for where there is no server.
  EXPECT_EQ(allocating.wait_for(2500ms), std::future_status::timeout);
  ASSERT_EQ(::kill(broker, SIGCONT), 0);
  expect_found(allocating);
}

TEST_F(job_beside_another, waits_for_what_that_held_when_it_has_gone) {
  auto const& files = other_->files();
  auto const ledger = memhandover::reopen_read_write(files.ledger.get());
  memhandover::ledger_view const view{ledger.get(), files.mailroom.get(),
                                      memhandover::shared_segment::access::read_write};
  auto& status = view.clients()[other_->slot()].status;
  // What the broker says first, before it takes back what that job has held.
  status.store(static_cast<std::uint32_t>(memhandover::client_status::gone));
  auto allocating = allocate();
  while (memory_->client().mailbox().waiting.load() == 0 &&
         allocating.wait_for(0s) != std::future_status::ready) {
    std::this_thread::yield();
  }
  status.store(static_cast<std::uint32_t>(memhandover::client_status::live));
  other_->release(all_);
  expect_found(allocating);
}

TEST_F(one_job_test, setting_it_up_leaves_its_memory_where_little_has_gone) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  auto* const first = memory.allocate_persistent(chunk / 4);
  auto* const prepared = memory.allocate_persistent(chunk * 7 / 4);
  auto* const lasts = memory.allocate_persistent(chunk / 4);
  EXPECT_TRUE(memory.free(prepared));
  memory.begin();
  auto* const again = memory.allocate_persistent(chunk * 7 / 4);
  EXPECT_EQ(again, prepared) << "for one chunk the rest of two was given up";
  memory.discard();
  for (auto* const each : {first, lasts, again}) {
    EXPECT_TRUE(memory.free(each));
  }
}

TEST_F(one_job_test, of_an_arena_in_which_something_lives_on_that_alone_is_kept) {
  auto& memory = *memory_;
  auto const chunk = world_.broker().chunk_bytes;
  memory.begin();
  auto* const goes = memory.allocate_arena(60 * chunk);
  auto* const lives_on = memory.allocate_arena(chunk);
  commit(true);
  EXPECT_TRUE(memory.free(goes));

  memory.begin();
  auto* const held = memory.allocate_arena((pool_chunks - 1) * chunk);
  EXPECT_EQ(memory.state(), step::arena_state::sound);
  commit();
  std::memset(lives_on, 1, chunk);
  EXPECT_TRUE(memory.free(held));
  EXPECT_TRUE(memory.free(lives_on));
  EXPECT_FALSE(memory.owns(lives_on));
}

}  // namespace
}  // namespace sluice::test::kept_memory
