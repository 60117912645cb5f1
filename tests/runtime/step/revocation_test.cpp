/// A job launches through the gate, and a server takes its arena at random instants: no launch
/// touches what has been taken, and what the job learns is what it would have learned undisturbed.
///
/// SLUICE_TEST_DISCARDS sets how many micro-batches have to be lost (100), and as many more as it
/// takes for each of the ways to lose or keep one to have been seen.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "runtime/step/driver_gate.hpp"
#include "tests/from_environment.hpp"
#include "tests/runtime/gate/gate_fixture.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test::revocation {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

using word = std::uint64_t;
constexpr std::size_t words = 512;  ///< of a segment that are worked on
constexpr std::uint32_t pool_chunks = 64;
constexpr std::uint32_t activations = 40;  ///< chunks of a micro-batch

/// to = from * factor + addend
void multiply_add(void** parameters) {
  word* to = nullptr;
  word const* from = nullptr;
  word factor = 0;
  word addend = 0;
  std::memcpy(&to, parameters[0], sizeof(to));
  std::memcpy(&from, parameters[1], sizeof(from));
  std::memcpy(&factor, parameters[2], sizeof(factor));
  std::memcpy(&addend, parameters[3], sizeof(addend));
  for (std::size_t i = 0; i < words; ++i) {
    to[i] = from[i] * factor + addend + i;
  }
}

/// Training in small: a micro-batch is a chain of kernels over segments of the arena, and its commit
/// adds the last of them to what lasts.
class gated_job {
 public:
  /// `takes`: a kernel of the chain needs so long on the device.
  gated_job(fault_world const& world, CUcontext context, std::chrono::nanoseconds takes = 60us)
      : kernel_{of(multiply_add, takes)},
        chunk_{world.broker().chunk_bytes},
        memory_{options(world)} {
    EXPECT_EQ(cuda_.set_current(context), CUDA_SUCCESS);
    auto const& view = memory_.client().view();
    gate_.set_pause_word(
        reinterpret_cast<std::uint64_t const volatile*>(&view.header().pause_until_ns));
    gate_.set_demand_word(reinterpret_cast<std::uint64_t const volatile*>(
        &view.controls()[memory_.client().slot()].demand));
    learned_ = reinterpret_cast<word*>(memory_.allocate_persistent(chunk_));
    EXPECT_EQ(cuda_.fill(reinterpret_cast<CUdeviceptr>(learned_), 0, words * 2, nullptr),
              CUDA_SUCCESS);
  }
  gated_job(gated_job const&) = delete;
  gated_job& operator=(gated_job const&) = delete;
  ~gated_job() {
    EXPECT_EQ(cuda_.synchronise_all(), CUDA_SUCCESS);
    gate_.set_demand_word(nullptr);
    gate_.set_pause_word(nullptr);
    EXPECT_TRUE(memory_.free(reinterpret_cast<std::byte*>(learned_)));
  }

  /// Runs the next micro-batch until it counts.
  void step() {
    while (!micro_batch()) {
      ++discards_;
    }
    ++commits_;
    for (std::size_t i = 0; i < words; ++i) {
      word value = i + commits_;
      for (word link = 0; link < links; ++link) {
        value = value * (2 * link + commits_ * 2 + 1) + link + i;
      }
      expected_[i] = expected_[i] * 31 + i;  // the commit's first kernel
      expected_[i] = (value * 3 + expected_[i]) * 7 + i;
    }
  }

  /// What the device has learned is what was committed, each once and in its order.
  void check() {
    std::vector<word> seen(words);
    ASSERT_EQ(
        cuda_.copy_out(seen.data(), reinterpret_cast<CUdeviceptr>(learned_), words * sizeof(word)),
        CUDA_SUCCESS);
    ASSERT_EQ(seen, expected_) << "after " << commits_ << " commits and " << discards_
                               << " discards";
  }

  [[nodiscard]] std::uint64_t discards() const noexcept { return discards_; }
  /// Commits that were left to the submitter, and how many of them it has dropped.
  [[nodiscard]] std::uint64_t deferred_commits() const noexcept { return deferred_; }
  [[nodiscard]] std::uint64_t dropped_commits() const noexcept { return dropped_; }
  /// Whether the submitter has dropped a commit, and has made another.
  [[nodiscard]] bool dropped_and_made() const noexcept {
    return dropped_ > 0 && deferred_ > dropped_;
  }

 private:
  static constexpr word links = 12;

  [[nodiscard]] step::training_memory::options options(fault_world const& world) {
    auto of = world.job();
    of.driver =
        memhandover::cuda_driver::load([this](char const* name) { return gate_.real(name); });
    of.gate = &driver_gate_;
    return of;
  }

  [[nodiscard]] bool micro_batch() {
    memory_.begin();
    gate_.expendable_thread(1);
    std::vector<std::byte*> segments;
    bool const ran = launch_chain(segments);
    auto const start = memory_.commit_begin(ran);
    gate_.expendable_thread(0);
    bool kept = ran && start != step::commit_start::taken_away;
    if (kept) {
      gate_.protect_thread(1);
      commit(reinterpret_cast<word*>(segments.back()));
      memory_.commit_end(false);
      gate_.protect_thread(0);
      launch(kernel_, learned_, learned_, 7, 0);  // the optimizer
      kept = memory_.commit_resolve(std::numeric_limits<std::int64_t>::max()).value();
      deferred_ += start == step::commit_start::deferred ? 1 : 0;
      dropped_ += kept ? 0 : 1;
    }
    if (!kept) {
      memory_.discard();
    }
    for (auto* const segment : segments) {
      if (memory_.is_former(segment)) {  // what a starved micro-batch has launched may still run
        EXPECT_EQ(cuda_.synchronise_all(), CUDA_SUCCESS);
      }
      EXPECT_TRUE(memory_.free(segment));
    }
    return kept;
  }

  /// False if there was no memory, not even addresses.
  [[nodiscard]] bool launch_chain(std::vector<std::byte*>& segments) {
    try {
      for (word link = 0; link <= links; ++link) {
        segments.push_back(memory_.allocate_arena(activations * chunk_ / (links + 1)));
        auto* const to = reinterpret_cast<word*>(segments.back());
        if (link == 0) {
          launch(counting_, to, to, 0, commits_ + 1);
        } else {
          launch(kernel_, to, reinterpret_cast<word*>(segments[link - 1]),
                 2 * (link - 1) + (commits_ + 1) * 2 + 1, link - 1);
        }
      }
    } catch (error const& why) {
      EXPECT_TRUE(why.kind() == error_kind::cancelled || why.kind() == error_kind::out_of_memory)
          << why.what();
      return false;
    }
    return true;
  }

  void commit(word const* last) {
    launch(kernel_, learned_, learned_, 31, 0);
    launch(adding_, learned_, last, 3, 0);
  }

  void launch(CUfunction what, word* to, word const* from, word factor, word addend) {
    std::array<void*, 4> parameters{&to, &from, &factor, &addend};
    ASSERT_EQ(cuda_.launch_kernel(what, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters.data(), nullptr),
              CUDA_SUCCESS);
  }

  /// to = i + addend, whatever was there
  static void count(void** parameters) {
    word* to = nullptr;
    word addend = 0;
    std::memcpy(&to, parameters[0], sizeof(to));
    std::memcpy(&addend, parameters[3], sizeof(addend));
    for (std::size_t i = 0; i < words; ++i) {
      to[i] = i + addend;
    }
  }
  /// to = from * factor + to
  static void add(void** parameters) {
    word* to = nullptr;
    word const* from = nullptr;
    word factor = 0;
    std::memcpy(&to, parameters[0], sizeof(to));
    std::memcpy(&from, parameters[1], sizeof(from));
    std::memcpy(&factor, parameters[2], sizeof(factor));
    for (std::size_t i = 0; i < words; ++i) {
      to[i] += from[i] * factor;
    }
  }
  [[nodiscard]] CUfunction of(fake_kernel_body body, std::chrono::nanoseconds takes) const {
    static std::array<std::size_t, 4> const sizes{8, 8, 8, 8};
    return static_cast<CUfunction>(
        driver_.register_kernel(body, sizes.data(), sizes.size(), takes.count()));
  }

  gate::driver_calls cuda_;
  gate::fake_calls_table driver_;
  sluice_gate_api const& gate_ =
      *gate::gate_library().get<sluice_gate_api const* (*)()>("sluice_gate_table")();
  step::driver_gate driver_gate_{gate_};
  CUfunction kernel_;
  CUfunction counting_ = of(count, 0us);
  CUfunction adding_ = of(add, 20us);
  std::size_t chunk_;
  step::training_memory memory_;
  word* learned_ = nullptr;
  std::vector<word> expected_ = std::vector<word>(words);
  std::uint64_t commits_ = 0;
  std::uint64_t discards_ = 0;
  std::uint64_t deferred_ = 0;
  std::uint64_t dropped_ = 0;
};

/// Whether calls are left to the submitter.
class revocation_test : public testing::TestWithParam<bool> {
 protected:
  revocation_test() {
    world_.start_broker();
    gate::driver_calls const cuda;
    EXPECT_EQ(cuda.init(0), CUDA_SUCCESS);
    EXPECT_EQ(cuda.retain(&context_, 0), CUDA_SUCCESS);
    gate_.set_deferred(GetParam() ? 1 : 0);
    gate_.set_run_ahead(std::chrono::nanoseconds{100us}.count());
  }
  revocation_test(revocation_test const&) = delete;
  revocation_test& operator=(revocation_test const&) = delete;
  ~revocation_test() override { gate_.set_run_ahead(0); }

  fault_world world_{"cuda", pool_chunks};
  CUcontext context_ = nullptr;
  sluice_gate_api const& gate_ =
      *gate::gate_library().get<sluice_gate_api const* (*)()>("sluice_gate_table")();
};

/// Takes memory, writes all over it, and gives it back, until it is told to stop.
void serve(std::stop_token const& stop, memhandover::serving_pool& server, std::size_t chunk) {
  std::mt19937 random{17};
  while (!stop.stop_requested()) {
    try {
      auto const taken =
          server.acquire((random() % 36 + 4) * chunk, steady_clock::now() + 10s, nullptr);
      std::memset(taken.data(), 0xee, taken.bytes());
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
    }
    for (auto const until = steady_clock::now() + std::chrono::microseconds{random() % 4000};
         steady_clock::now() < until;) {
      std::this_thread::yield();
    }
  }
}

TEST_P(revocation_test, what_is_learned_is_what_was_committed_whatever_is_taken_away) {
  std::uint64_t const discards = from_environment("SLUICE_TEST_DISCARDS", 100);
  gated_job job{world_, context_};
  auto const server = world_.join_server();
  std::uint64_t const deferred_before = gate_.deferred();
  for (int i = 0; i < 20; ++i) {
    job.step();
  }
  job.check();
  {
    std::jthread const serving{
        [&](std::stop_token const& stop) { serve(stop, *server, world_.broker().chunk_bytes); }};
    // When a demand comes is chance, and whether a commit waits then; ever so many may not meet one.
    auto const enough = [&] {
      return job.discards() >= discards && (!GetParam() || job.dropped_and_made());
    };
    for (int i = 0; !enough() && job.discards() < 100 * discards && !HasFailure(); ++i) {
      job.step();
      if (i % 50 == 0) {
        job.check();
      }
    }
  }
  job.check();
  EXPECT_EQ(gate_.deferred() > deferred_before, GetParam());
  EXPECT_EQ(job.dropped_and_made(), GetParam())
      << job.deferred_commits() << " left to the submitter, " << job.dropped_commits()
      << " dropped";
}

TEST_P(revocation_test, a_demand_does_not_wait_for_what_was_launched_ahead_of_the_device) {
  gated_job job{world_, context_, 60ms};
  auto const server = world_.join_server();
  job.step();  // the driver has accepted every kind of launch
  std::uint64_t const before = gate_.launches() + gate_.deferred();
  {
    std::jthread const training{[&] {
      EXPECT_EQ(gate::driver_calls{}.set_current(context_), CUDA_SUCCESS);
      job.step();
    }};
    EXPECT_TRUE(gate::eventually([&] { return gate_.launches() + gate_.deferred() > before + 3; }));
    (void)server->acquire(40 * world_.broker().chunk_bytes, steady_clock::now() + 10s, nullptr);
  }
  EXPECT_GT(job.discards(), 0U) << "the demand waited until all of it had run";
  job.check();
}

INSTANTIATE_TEST_SUITE_P(, revocation_test, testing::Bool(),
                         [](auto const& chosen) { return chosen.param ? "deferred" : "waiting"; });

}  // namespace
}  // namespace sluice::test::revocation
