/// Every allocation fails once in turn, of the control thread that answers demands, and of the thread that trains: no
/// demand stays without an answer, the process goes on, and no chunk is lost.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "tests/memhandover/failing_allocations.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/job_and_server.hpp"
#include "tests/runtime/step/walk.hpp"

namespace sluice::test::out_of_memory {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

/// A gate of a device that never runs, which knows what it has been told.
class watched_gate final : public step::launch_gate {
 public:
  bool close(std::int64_t /*deadline_ns*/) override {
    closed_.store(true);
    return true;
  }
  bool wait_idle(std::int64_t /*deadline_ns*/) override { return true; }
  void open() override { closed_.store(false); }
  void abort_begin() override { aborting_.store(true); }
  void abort_end() override { aborting_.store(false); }
  void set_urgent(bool /*urgent*/) override {}

  /// Waits, in vain for a while at most.
  [[nodiscard]] bool is_opened() const {
    auto const until = steady_clock::now() + patience;
    while (closed_.load() && steady_clock::now() < until) {
      std::this_thread::yield();
    }
    return !closed_.load();
  }
  [[nodiscard]] bool aborting() const { return aborting_.load(); }

 private:
  std::atomic<bool> closed_{false};
  std::atomic<bool> aborting_{false};
};

class out_of_memory_test : public job_and_server_test<watched_gate> {
 protected:
  out_of_memory_test() : job_and_server_test{12} {}

  /// Whether all of the pool can be the server's, and then a micro-batch's.
  void expect_nothing_lost() {
    // What was demanded in vain is not demanded again at once.
    auto const until = steady_clock::now() + patience;
    auto all = acquire(chunks_);
    while (!all && steady_clock::now() < until) {
      all = acquire(chunks_);
    }
    ASSERT_TRUE(all.has_value()) << said_;
    all.reset();
    EXPECT_TRUE(gate_.is_opened()) << "launches are held for ever";
    memory_->begin();
    EXPECT_FALSE(gate_.aborting());
    std::vector<std::byte*> blocks;
    for (std::uint32_t i = 0; i < chunks_ && memory_->state() == step::arena_state::sound; ++i) {
      blocks.push_back(memory_->allocate_arena(chunk_));
    }
    EXPECT_EQ(memory_->state(), step::arena_state::sound) << memory_->shortage();
    free(blocks);
    end_micro_batch(false);
  }

  void end_micro_batch(bool outlived) {
    memory_->commit_begin(false) == step::commit_start::begun ? memory_->commit_end(outlived)
                                                              : memory_->discard();
  }
  void free(std::vector<std::byte*>& blocks) {
    for (auto* const each : blocks) {
      EXPECT_TRUE(memory_->free(each));
    }
    blocks.clear();
  }
};

TEST_P(out_of_memory_test, a_demand_is_answered_and_no_chunk_is_lost) {
  pid_t control = 0;
  while (control == 0) {  // it names itself
    control = thread_named("sluice-control");
  }
  unsigned which = 1;
  for (bool hit = true; hit && which < walk::too_many && !HasFailure(); ++which) {
    SCOPED_TRACE("allocation " + std::to_string(which));
    memory_->begin();
    std::vector<std::byte*> blocks;
    for (std::uint32_t i = 0; i + 2 < chunks_; ++i) {
      blocks.push_back(memory_->allocate_arena(chunk_));
    }
    ASSERT_TRUE(memory_->free(blocks.back()));  // some of it idle, some in use
    blocks.pop_back();

    fail_allocation(control, which);
    {
      auto const first = acquire(chunks_ / 2);
      auto const second = acquire(2);
      (void)acquire(1);
    }
    hit = allocation_failed();

    end_micro_batch(false);
    free(blocks);
    expect_nothing_lost();
  }
  EXPECT_GT(which, 5U) << "the control thread allocates nothing";
  std::printf("%u allocations failed\n", which - 2);
}

TEST_P(out_of_memory_test, a_job_goes_on_and_no_chunk_is_lost) {
  walk at;
  for (bool hit = true; hit && at.goes_on(); at.step()) {
    SCOPED_TRACE("allocation " + std::to_string(at.place() + 1));
    unsigned left = at.place() + 1;
    std::vector<std::byte*> blocks;
    std::vector<std::byte*> kept;
    // As behind the C boundary: what fails is told, and the job goes on.
    auto const trying = [&](auto const& work) {
      std::optional<failing_here> here;
      if (left > 0) {
        here.emplace(left);
      }
      try {
        work();
      } catch (std::bad_alloc const&) {  // NOLINT(bugprone-empty-catch)
      } catch (error const&) {           // NOLINT(bugprone-empty-catch): the memory has gone
      }
    };
    auto const allocate = [&](std::uint32_t count) {
      for (std::uint32_t i = 0; i < count; ++i) {
        std::byte* found = nullptr;
        trying([&] { found = memory_->allocate_arena(chunk_ / 2); });
        if (found != nullptr) {
          blocks.push_back(found);
        }
      }
    };
    auto const free_all = [&](std::vector<std::byte*>& of) {
      for (auto* const each : of) {
        bool freed = false;
        trying([&] { freed = memory_->free(each); });
        EXPECT_TRUE(freed);
      }
      of.clear();
    };
    for (int round = 0; round < 2; ++round) {
      trying([&] { memory_->begin(); });
      allocate(6);
      std::byte* lasts = nullptr;
      trying([&] { lasts = memory_->allocate_persistent(chunk_ + 1); });
      if (lasts != nullptr) {
        kept.push_back(lasts);
      }
      trying([&] { end_micro_batch(true); });  // with all of it alive
      trying([&] { memory_->begin(); });
      std::vector<std::byte*> earlier;
      earlier.swap(blocks);
      allocate(8);
      (void)acquire(chunks_ - 5);
      free_all(earlier);
      allocate(2);
      trying([&] { end_micro_batch(false); });
      free_all(blocks);
      free_all(kept);
    }
    hit = left == 0;
    trying([&] { memory_->begin(); });
    end_micro_batch(false);
    expect_nothing_lost();
  }
  EXPECT_GT(at.place(), 20U);
  std::printf("%u allocations failed\n", at.steps() - 1);
}

// In whatever order a compiler has a call and the words about it worked out: what the call has made is not lost.
TEST(driver_calls, that_succeed_allocate_nothing) {
  memhandover::cuda_driver const driver;
  unsigned left = 1;
  {
    failing_here const here{left};
    driver.check(CUDA_SUCCESS, "cannot do what takes more words than a short string has room for, ",
                 64);
  }
  EXPECT_EQ(left, 1U);
}

INSTANTIATE_TEST_SUITE_P(memory, out_of_memory_test, testing::Values("host", "cuda"),
                         [](auto const& of) { return std::string{of.param}; });

}  // namespace
}  // namespace sluice::test::out_of_memory
