/// The cut: numbers are granted when all have arrived, and a pause ends them for all at the same one.
#include "nccl_shim/cut.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

std::int64_t in(std::chrono::nanoseconds span) {
  return (std::chrono::steady_clock::now().time_since_epoch() + span).count();
}

constexpr numbered_call reduce{1, 7, 100, 0};

class two_ranks : public ::testing::Test {
 protected:
  [[nodiscard]] static outcome now(cut& of) { return of.await(in(0ns)); }

  std::unique_ptr<cut_memory> shared = std::make_unique<cut_memory>();
  cut first{*shared, 0, 2};
  cut second{*shared, 1, 2};
};

TEST_F(two_ranks, a_number_is_granted_when_all_have_arrived) {
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(first.number(), 2U);
  EXPECT_EQ(now(first), outcome::late);
  EXPECT_EQ(now(second), outcome::granted);  // still the first
}

TEST_F(two_ranks, a_pause_ends_the_grants_and_owes_what_was_granted) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(first.pause(false), 1U);
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::late);
  EXPECT_EQ(now(first), outcome::granted);
  first.launched();
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::granted);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  EXPECT_EQ(second.pause(false), 1U);
  first.resume();
  EXPECT_EQ(now(first), outcome::late);  // the other one pauses yet
  second.resume();
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_F(two_ranks, a_new_epoch_drops_what_was_not_granted_and_numbers_go_on_from_the_cut) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(second.pause(true), 1U);
  EXPECT_EQ(now(first), outcome::granted);  // that is owed
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::dropped);
  EXPECT_EQ(now(second), outcome::dropped);
  second.resume();
  first.arrive(reduce);
  EXPECT_EQ(first.number(), 2U);
  EXPECT_EQ(now(first), outcome::late);
  second.arrive(reduce);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_F(two_ranks, an_arrival_of_an_earlier_epoch_does_not_count) {
  first.arrive(reduce);
  EXPECT_EQ(second.pause(true), 0U);
  second.resume();
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::dropped);  // it did not know yet
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  EXPECT_EQ(now(first), outcome::dropped);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_F(two_ranks, calls_that_differ_are_named_and_end_all_waits) {
  numbered_call const other{2, 7, 100, 0};
  first.arrive(reduce);
  second.arrive(other);
  EXPECT_EQ(now(first), outcome::differs);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = first.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->ranks, (std::array{0U, 1U}));
  EXPECT_EQ(found->calls, (std::array{reduce, other}));
}

TEST_F(two_ranks, a_death_ends_all_waits_but_those_for_what_is_granted) {
  first.arrive(reduce);
  second.arrive(reduce);
  EXPECT_EQ(first.lost(), std::nullopt);
  first.declare_lost(1);
  EXPECT_EQ(second.lost(), 1U);
  EXPECT_EQ(now(first), outcome::granted);
  EXPECT_EQ(first.await_debts(1, in(0ns)), outcome::lost);
  first.launched();
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::lost);
}

TEST_F(two_ranks, who_sleeps_is_woken) {
  first.arrive(reduce);
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  while (shared->sleepers.load() == 0) {
    std::this_thread::yield();
  }
  second.arrive(reduce);
}

std::uint64_t from_environment(char const* name, std::uint64_t otherwise) {
  char const* const text = std::getenv(name);
  return text != nullptr ? std::stoull(text) : otherwise;
}

/// A rank that trains in micro-batches with collectives inside, and whoever pauses it.
class training_rank {
 public:
  struct launch {
    std::uint64_t number, batch, item;
    bool operator==(launch const&) const = default;
  };
  static constexpr std::uint64_t inside = 3;

  training_rank(cut_memory& shared, unsigned rank, unsigned ranks, std::uint64_t batches)
      : own_{shared, rank, ranks}, batches_{batches}, random_{std::random_device{}()} {}

  void train() {
    for (std::uint64_t batch = 0; batch < batches_;) {
      std::uint64_t item = 0;
      while (item <= inside) {  // the last one is the commit
        own_.arrive({item, batch, 0, 0});
        auto const became = own_.await(in(60s));
        if (became == outcome::dropped) {
          item = 0;
          ++dropped_;
          continue;
        }
        ASSERT_EQ(became, outcome::granted);
        std::lock_guard const inside_gate{gate_};
        launches_.push_back({own_.number(), batch, item++});
        own_.launched();
      }
      ++batch;
    }
  }

  /// Until it has been trained.
  void pause(std::atomic<bool> const& over, cut& from_outside) {
    while (!over.load()) {
      for (auto spins = random_() % 200; spins > 0; --spins) {
        std::this_thread::yield();
      }
      auto const at = from_outside.pause(random_() % 2 == 0);
      ASSERT_EQ(from_outside.await_debts(at, in(60s)), outcome::granted);
      {
        std::lock_guard const closed{gate_};
        ASSERT_EQ(launches_.empty() ? 0 : launches_.back().number, at);
        std::this_thread::yield();
        ASSERT_EQ(launches_.empty() ? 0 : launches_.back().number, at);
      }
      from_outside.resume();
      ++pauses_;
    }
  }

  [[nodiscard]] cut& own() noexcept { return own_; }
  [[nodiscard]] std::vector<launch> const& launches() const noexcept { return launches_; }
  [[nodiscard]] std::uint64_t pauses() const noexcept { return pauses_; }
  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  cut own_;
  std::uint64_t batches_;
  std::minstd_rand random_;
  std::mutex gate_;  // guards the launches
  std::vector<launch> launches_;
  std::uint64_t pauses_ = 0;
  std::uint64_t dropped_ = 0;
};

struct disturbance {
  std::uint64_t pauses = 0;
  std::uint64_t dropped = 0;
};

/// Four ranks train so many micro-batches, each of them paused again and again.
disturbance train_and_pause(std::uint64_t batches) {
  constexpr unsigned ranks = 4;
  auto const shared = std::make_unique<cut_memory>();
  std::vector<std::unique_ptr<training_rank>> all;
  for (unsigned rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<training_rank>(*shared, rank, ranks, batches));
  }
  std::atomic<bool> over{false};
  {
    std::vector<std::jthread> pausers;
    std::vector<std::jthread> trainers;
    for (auto const& one : all) {
      trainers.emplace_back([&one] { one->train(); });
      pausers.emplace_back([&one, &over] { one->pause(over, one->own()); });
    }
    trainers.clear();
    over = true;
  }
  disturbance seen;
  for (auto const& one : all) {
    EXPECT_EQ(one->launches(), all.front()->launches());
    seen.pauses += one->pauses();
    seen.dropped += one->dropped();
  }
  auto const& last = all.front()->launches().back();
  EXPECT_EQ(last.batch, batches - 1);
  EXPECT_EQ(last.item, training_rank::inside);
  return seen;
}

TEST(cut_stress, all_ranks_launch_the_same_whenever_they_are_paused) {
  auto const batches = from_environment("SLUICE_TEST_BATCHES", 300);
  disturbance all;
  // On few processors the ranks may be done before anybody has paused them.
  for (int round = 0; (all.pauses < batches / 10 || all.dropped == 0) && !HasFailure(); ++round) {
    ASSERT_LT(round, 1000);
    auto const seen = train_and_pause(batches);
    all.pauses += seen.pauses;
    all.dropped += seen.dropped;
  }
}

TEST(cut_processes, the_others_leave_their_waits_when_a_rank_is_killed) {
  constexpr unsigned ranks = 3;
  void* const memory = ::mmap(nullptr, sizeof(cut_memory), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  std::mt19937 random{std::random_device{}()};
  for (std::uint64_t round = from_environment("SLUICE_TEST_KILLS", 20); round > 0; --round) {
    auto* const shared = new (memory) cut_memory;
    std::vector<pid_t> pids;
    for (unsigned rank = 0; rank < ranks; ++rank) {
      pid_t const pid = ::fork();
      if (pid == 0) {
        cut own{*shared, rank, ranks};
        for (;;) {
          own.arrive(reduce);
          auto const became = own.await(in(60s));
          if (became != outcome::granted) {
            ::_exit(became == outcome::lost && own.lost() == 1U ? 0 : 1);
          }
          own.launched();
        }
      }
      pids.push_back(pid);
    }
    auto const far = random() % 2000;
    while (cut_word::unpack(shared->word.load()).granted < far) {
      std::this_thread::yield();
    }
    ASSERT_EQ(::kill(pids[1], SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(pids[1], &status, 0), pids[1]);
    cut{*shared, 0, ranks}.declare_lost(1);
    for (unsigned const rank : {0U, 2U}) {
      ASSERT_EQ(::waitpid(pids[rank], &status, 0), pids[rank]);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
  ::munmap(memory, sizeof(cut_memory));
}

}  // namespace
}  // namespace sluice::nccl_shim
