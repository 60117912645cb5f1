/// A job that trains for a long time keeps its arena in one run of the pool, so that whatever the
/// server demands are neighbours and need no mapping.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "memhandover/ledger/chunk_choice.hpp"
#include "tests/from_environment.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

/// Of the pool's chunks what a job like this has, once it has settled.
constexpr std::uint32_t pool_chunks = 96;
constexpr std::uint32_t weights = 16;
constexpr std::uint32_t optimizer = 7;
constexpr std::uint32_t activations = 66;
/// And before that, while it sets itself up.
constexpr std::uint32_t preparation = 24;

/// Training as torch does it on a GPU: segments of several sizes, all of a discarded micro-batch's
/// freed together, and the optimizer's memory given back whenever torch empties its cache.
class long_job {
 public:
  long_job(fault_world const& world, unsigned seed)
      : random_(seed), chunk_(world.broker().chunk_bytes), memory_(options(world)) {
    for (std::uint32_t i = 0; i < weights; ++i) {
      (void)memory_.allocate_persistent(chunk_);
    }
    (void)memory_.free(memory_.allocate_persistent(preparation * chunk_));
    std::size_t const sizes[] = {chunk_ / 3, chunk_, chunk_ * 5 / 2, chunk_ * 7};
    for (std::size_t left = activations * chunk_; left > 0; left -= sizes_.back()) {
      sizes_.push_back(std::min(left, sizes[below(4)]));
    }
  }

  /// A step; `meanwhile` is called once at a random instant of the micro-batch. False if the
  /// micro-batch had to be discarded.
  template <typename Function>
  bool step(Function&& meanwhile) {
    auto const instant = below(static_cast<std::uint32_t>(sizes_.size()));
    memory_.begin();
    bool lost = false;
    for (std::size_t i = 0; i < sizes_.size() && !lost; ++i) {
      if (i == instant) {
        meanwhile();
      }
      segments_.push_back(memory_.allocate_arena(sizes_[i]));
      lost = memory_.state() != step::arena_state::sound;
    }
    if (lost || memory_.commit_begin(false) == step::commit_start::taken_away) {
      memory_.discard();
      free(segments_);
      if (below(2) == 0) {
        empty_cache();
      }
      return false;
    }
    memory_.commit_end(false);
    optimize();
    free(segments_);
    return true;
  }

 private:
  [[nodiscard]] step::training_memory::options options(fault_world const& world) {
    auto of = world.job();
    of.gate = &gate_;
    return of;
  }
  [[nodiscard]] std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>(random_() % bound);
  }
  void free(std::vector<std::byte*>& blocks) {
    std::shuffle(blocks.begin(), blocks.end(), random_);
    for (auto* const block : blocks) {
      EXPECT_TRUE(memory_.free(block));
    }
    blocks.clear();
  }
  void optimize() {
    while (temporaries_.size() < optimizer) {
      temporaries_.push_back(memory_.allocate_persistent(chunk_));
    }
    auto* const workspace = memory_.allocate_persistent(chunk_ / 2);
    EXPECT_TRUE(memory_.free(workspace));
  }
  void empty_cache() { free(temporaries_); }

  idle_gate gate_;
  std::mt19937 random_;
  std::size_t chunk_;
  std::vector<std::size_t> sizes_;  ///< of a micro-batch's segments
  step::training_memory memory_;
  std::vector<std::byte*> segments_, temporaries_;
};

/// Chunks of a demand.
std::uint32_t some_size(std::mt19937& random) {
  return std::array{4U, 16U, 48U}[random() % 3];
}

/// The seed, and how many chunks nobody has.
class arena_runs_test : public testing::TestWithParam<std::tuple<unsigned, std::uint32_t>> {
 protected:
  arena_runs_test() { world_.start_broker(); }

  /// Lets the job resolve; then other models have what it does not need, but for some chunks.
  void resolve(long_job& job, memhandover::serving_pool& server) {
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(job.step([] {}));
    }
    auto const slack = std::get<1>(GetParam()) * world_.broker().chunk_bytes;
    if (auto const free = server.usage().free_bytes; free > slack) {
      others_ = server.acquire(free - slack, steady_clock::now() + 5s);
    }
  }
  [[nodiscard]] unsigned seed() const { return std::get<0>(GetParam()); }

  fault_world world_{"cuda", pool_chunks};
  memhandover::placement others_;
};

TEST_P(arena_runs_test, what_the_server_demands_are_neighbours_however_long_the_job_has_trained) {
  long_job job{world_, seed()};
  auto const server = world_.join_server();
  resolve(job, *server);
  auto const nothing = [] {};
  std::mt19937 random{seed()};
  int parted = 0;
  auto const demands = static_cast<int>(repeated(40, 10));
  for (int i = 0; i < demands; ++i) {
    std::vector<std::uint32_t> given;
    auto const wanted = some_size(random);
    job.step([&] { given = server->acquire_chunks(wanted, steady_clock::now() + 5s, nullptr); });
    ASSERT_EQ(given.size(), wanted);
    parted += memhandover::are_neighbours(given) ? 0 : 1;
    for (auto late = random() % 3; late > 0; --late) {
      (void)job.step(nothing);  // while the server still has it
    }
    server->give_back_chunks(given);
    for (int tries = 0; !job.step(nothing); ++tries) {
      ASSERT_LT(tries, 4);
    }
  }
  EXPECT_EQ(parted, 0) << "of " << demands;
}

TEST_P(arena_runs_test, a_demand_at_any_instant_gets_its_chunks_and_as_neighbours) {
  long_job job{world_, seed()};
  auto const server = world_.join_server();
  resolve(job, *server);
  std::atomic<bool> done{false};
  int parted = 0;
  auto const demands = static_cast<int>(repeated(60, 15));
  std::thread serving{[&] {
    std::mt19937 random{seed()};
    for (int i = 0; i < demands; ++i) {
      auto const wanted = some_size(random);
      memhandover::handover_report report;
      auto const given = server->acquire_chunks(wanted, steady_clock::now() + 5s, &report);
      // What was at hand goes without neighbours rather than that a micro-batch is discarded.
      parted += report.bytes_live > 0 && !memhandover::are_neighbours(given) ? 1 : 0;
      server->give_back_chunks(given);
      for (auto until = steady_clock::now() + std::chrono::microseconds{random() % 20000};
           steady_clock::now() < until;) {
        std::this_thread::yield();
      }
    }
    done = true;
  }};
  while (!done) {
    (void)job.step([] {});
  }
  serving.join();
  EXPECT_EQ(parted, 0) << "of " << demands;
}

INSTANTIATE_TEST_SUITE_P(seeds, arena_runs_test,
                         testing::Combine(testing::Range(1U, 3U), testing::Values(0U, 6U)));

}  // namespace
}  // namespace sluice::test
