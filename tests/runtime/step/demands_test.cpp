/// What a demand waits for, and what it does not: commits that go on, and commits that wait for the pool themselves; and
/// what is not demanded at all, because it can never be had.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/ledger/layout.hpp"
#include "tests/runtime/step/job_and_server.hpp"

namespace sluice::test::demands {
namespace {

using namespace std::chrono_literals;
using memhandover::client_kind;
using memhandover::demand;
using memhandover::demand_answer;
using memhandover::lifetime;
using memhandover::tenant_client;
using std::chrono::steady_clock;

class demands_test : public job_and_server_test<idle_gate> {
 protected:
  void begin_commit() { ASSERT_EQ(memory_->commit_begin(false), step::commit_start::begun); }
  /// Once the control thread has been asked for something.
  void await_demand() {
    auto const& demand = memory_->client().view().controls()[memory_->client().slot()].demand;
    while (memhandover::numbered::unpack(demand.load()).chunks == 0) {
      std::this_thread::yield();
    }
  }
};

TEST_P(demands_test, what_nobody_uses_is_given_while_a_commit_goes_on) {
  memory_->begin();
  auto* const used = memory_->allocate_arena(4 * chunk_);
  auto* const rest = memory_->allocate_arena((chunks_ - 4) * chunk_);
  ASSERT_TRUE(memory_->free(rest));
  begin_commit();
  if (on_gpu()) {
    // What a job on a GPU has mapped it gives only behind its closed gate.
    ASSERT_TRUE(memory_->free(used));
    memory_->commit_end(false);
    auto const all = acquire(chunks_);
    ASSERT_TRUE(all.has_value());
    return;
  }

  auto const given = acquire(chunks_ / 2);

  ASSERT_TRUE(given.has_value());
  EXPECT_EQ(given->bytes(), chunks_ / 2 * chunk_);
  EXPECT_EQ(memory_->state(), step::arena_state::sound);
  memory_->commit_end(true);
  ASSERT_TRUE(memory_->free(used));
}

TEST_P(demands_test, a_commit_has_what_it_needs_of_what_the_server_waits_for) {
  memory_->begin();
  auto* const used = memory_->allocate_arena((chunks_ - 4) * chunk_);
  begin_commit();
  std::optional<memhandover::placement> given;
  std::jthread serving{[&] { given = acquire(chunks_ / 2); }};
  await_demand();

  // Four chunks are nobody's, and the server waits for twelve.
  auto* const kept = memory_->allocate_persistent(2 * chunk_);
  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  serving.join();

  ASSERT_TRUE(given.has_value()) << said_;
  EXPECT_EQ(given->bytes(), chunks_ / 2 * chunk_);
  ASSERT_TRUE(memory_->free(kept));
}

TEST_P(demands_test, a_commit_that_waits_for_the_pool_is_not_waited_for) {
  auto first = acquire(4);
  ASSERT_TRUE(first.has_value());
  memory_->begin();
  auto* const used = memory_->allocate_arena((chunks_ - 4) * chunk_);
  begin_commit();
  std::atomic<bool> refused{false};
  std::jthread serving{[&] {
    auto const before = steady_clock::now();
    EXPECT_FALSE(acquire(chunks_ / 2).has_value());
    EXPECT_LT(steady_clock::now() - before, patience);
    refused = true;
    first.reset();  // which is what the commit waits for
  }};
  await_demand();

  auto* const kept = memory_->allocate_persistent(2 * chunk_);
  EXPECT_TRUE(refused);
  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  serving.join();

  EXPECT_TRUE(acquire(chunks_ / 2).has_value()) << said_;
  ASSERT_TRUE(memory_->free(kept));
}

/// On the host torch's allocator serves several threads at a time, and no allocation lets a demand go first.
class demands_on_gpu_test : public demands_test {};

TEST_P(demands_on_gpu_test, a_commit_behind_a_thread_that_waits_for_the_pool_is_not_waited_for) {
  auto first = acquire(4);
  ASSERT_TRUE(first.has_value());
  memory_->begin();
  auto* const used = memory_->allocate_arena((chunks_ - 4) * chunk_);
  begin_commit();
  std::jthread serving{[&] {
    EXPECT_FALSE(acquire(chunks_ / 2).has_value());
    first.reset();  // which is what the thread waits for
  }};
  await_demand();

  std::byte* kept = nullptr;
  std::jthread other{[&] { kept = memory_->allocate_persistent(2 * chunk_); }};
  other.join();
  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  serving.join();

  EXPECT_TRUE(acquire(chunks_ / 2).has_value()) << said_;
  ASSERT_TRUE(memory_->free(kept));
}

TEST_P(demands_on_gpu_test, no_thread_lets_a_demand_go_first_that_waits_for_a_commit) {
  auto const part = chunks_ / 3;
  memory_->begin();
  auto* const outlives = memory_->allocate_arena(part * chunk_);
  auto* const rest = memory_->allocate_arena(part * chunk_);
  ASSERT_TRUE(memory_->free(rest));
  begin_commit();
  memory_->commit_end(true);  // so that the job has chunks that it does not use
  memory_->begin();
  auto* const used = memory_->allocate_arena(part / 2 * chunk_);
  begin_commit();
  std::optional<memhandover::placement> given;
  std::jthread serving{[&] { given = acquire(2 * part - 1, 1500ms); }};
  await_demand();

  // The commit could not go on before that if both needed the lock of torch's allocator.
  std::byte* kept = nullptr;
  std::jthread other{[&] { kept = memory_->allocate_persistent(chunk_); }};
  other.join();
  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  serving.join();

  EXPECT_TRUE(given.has_value()) << said_;
  ASSERT_TRUE(memory_->free(kept));
  ASSERT_TRUE(memory_->free(outlives));
}

TEST_P(demands_test, a_commit_that_waits_has_what_the_server_reserves) {
  auto first = acquire(4);
  ASSERT_TRUE(first.has_value());
  memory_->begin();
  auto* const used = memory_->allocate_arena((chunks_ - 4) * chunk_);
  begin_commit();
  server_->set_reserve(4 * chunk_);
  std::jthread serving{[&] {
    while (memory_->client().mailbox().waiting.load() == 0) {
      std::this_thread::yield();
    }
    first.reset();
  }};

  auto* const kept = memory_->allocate_persistent(2 * chunk_);

  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  ASSERT_TRUE(memory_->free(kept));
}

TEST_P(demands_test, what_lasts_is_had_of_what_the_server_reserves_by_who_has_waited_for_it) {
  server_->set_reserve(chunks_ * chunk_);
  auto* const kept = memory_->allocate_persistent(2 * chunk_);
  EXPECT_NE(kept, nullptr);
  ASSERT_TRUE(memory_->free(kept));
}

/// The ledger's header, to be written as its writer does; clients cannot.
class written_header {
 public:
  written_header() {
    for (auto const& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry.path(), gone)
              .string()
              .rfind("/memfd:sluice-ledger", 0) == 0) {
        memhandover::unique_fd const file{::open(entry.path().c_str(), O_RDWR | O_CLOEXEC)};
        at_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
        break;
      }
    }
  }
  written_header(written_header const&) = delete;
  written_header& operator=(written_header const&) = delete;
  ~written_header() { ::munmap(at_, bytes); }

  [[nodiscard]] bool found() const noexcept { return at_ != MAP_FAILED; }
  memhandover::ledger_header* operator->() const noexcept {
    return static_cast<memhandover::ledger_header*>(at_);
  }

 private:
  static constexpr std::size_t bytes = sizeof(memhandover::ledger_header);
  void* at_ = MAP_FAILED;
};

TEST_P(demands_test, what_a_server_held_that_has_gone_is_waited_for) {
  auto held = acquire(chunks_ - 2);
  ASSERT_TRUE(held.has_value());
  written_header const header;
  ASSERT_TRUE(header.found());
  // What the broker says first, before it takes back what that server has held.
  header->serving_now.store(0);
  std::jthread serving{[&] {
    while (memory_->client().mailbox().waiting.load() == 0) {
      std::this_thread::yield();
    }
    held.reset();
  }};

  std::byte* kept = nullptr;
  EXPECT_NO_THROW(kept = memory_->allocate_persistent(8 * chunk_));

  header->serving_now.store(1);
  if (kept == nullptr) {
    (void)memory_->client().wait_grantable(chunks_, steady_clock::now() + 1s);  // ends the thread
    return;
  }
  ASSERT_TRUE(memory_->free(kept));
}

TEST_P(demands_test, a_demand_that_is_withdrawn_leaves_a_commit_alone) {
  memory_->begin();
  auto* const used = memory_->allocate_arena(chunks_ * chunk_);
  begin_commit();
  EXPECT_THROW((void)server_->acquire(chunk_, steady_clock::now() + 50ms), error);
  while (memory_->urgent()) {
    std::this_thread::yield();
  }
  ASSERT_TRUE(memory_->free(used));
  memory_->commit_end(false);
  EXPECT_TRUE(acquire(chunks_ / 2).has_value()) << said_;
}

TEST_P(demands_test, nothing_is_taken_for_what_can_never_be_had) {
  auto* const kept = memory_->allocate_persistent(4 * chunk_);
  memory_->begin();
  auto* const used = memory_->allocate_arena((chunks_ - 4) * chunk_);

  EXPECT_FALSE(acquire(chunks_ - 3).has_value());
  EXPECT_NE(said_.find("at most"), std::string::npos) << said_;
  EXPECT_NE(said_.find("keeps"), std::string::npos) << said_;
  EXPECT_EQ(memory_->state(), step::arena_state::sound) << "the micro-batch goes on";
  auto const& told = memory_->client().view().controls()[memory_->client().slot()].refused;
  EXPECT_EQ(told.load(), chunks_ - 3);

  ASSERT_TRUE(memory_->free(kept));
  auto const given = acquire(chunks_ - 3);
  EXPECT_TRUE(given.has_value()) << said_;
  EXPECT_EQ(memory_->state(), step::arena_state::revoked);
  memory_->free(used);
  memory_->discard();
}

INSTANTIATE_TEST_SUITE_P(both, demands_test, testing::Values("host", "cuda"),
                         [](auto const& of) { return std::string{of.param}; });
INSTANTIATE_TEST_SUITE_P(fake, demands_on_gpu_test, testing::Values("cuda"),
                         [](auto const& of) { return std::string{of.param}; });

TEST(futile_demands_test, one_that_costs_micro_batches_in_vain_is_not_made_again_at_once) {
  fault_world world{"host"};
  world.start_broker();
  std::atomic<int> demanded{0};
  std::mutex one;
  std::vector<std::uint32_t> held;
  // It says nothing of the chunks that it keeps.
  constexpr std::size_t kept = 3;
  auto const job = tenant_client::join(world.broker(), client_kind::training, "job",
                                       [&](demand const& /*what*/) {
                                         ++demanded;
                                         demand_answer given;
                                         std::lock_guard const lock{one};
                                         for (; held.size() > kept; held.pop_back()) {
                                           given.chunks.push_back(held.back());
                                           ++given.live_chunks;
                                         }
                                         return given;
                                       });
  auto const all = job->view().shape();
  job->ask(all.chunk_count, lifetime::revocable, steady_clock::now() + patience);
  {
    std::lock_guard const lock{one};
    held = job->collect();
    ASSERT_EQ(held.size(), all.chunk_count);
  }
  auto const server = world.join_server();
  auto const refusal = [&](std::uint64_t bytes) {
    try {
      (void)server->acquire(bytes, steady_clock::now() + patience);
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::out_of_memory);
      return std::string{why.what()};
    }
    return std::string{};
  };

  EXPECT_NE(refusal(all.bytes()).find("can be had"), std::string::npos);
  auto const before = demanded.load();
  EXPECT_GT(before, 0);
  EXPECT_NE(refusal(all.bytes()).find("in vain"), std::string::npos);
  EXPECT_EQ(demanded, before);

  auto const less = server->acquire(all.chunk_bytes, steady_clock::now() + patience);
  EXPECT_EQ(less.bytes(), all.chunk_bytes) << "less is had as before";
}

}  // namespace
}  // namespace sluice::test::demands
