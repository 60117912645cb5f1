/// The cut: numbers are granted when all have arrived, and a pause ends them for all at the same one.
#include "nccl_shim/cut.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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

/// Of whom one needs that both are asked.
class two_ranks_that_agree : public two_ranks {
 protected:
  two_ranks_that_agree() { first.need(true); }
};

TEST_F(two_ranks, nobody_waits_while_nobody_needs_it) {
  for (int i = 0; i < 5; ++i) {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_F(two_ranks, the_first_that_needs_it_owes_what_the_other_has_launched) {
  for (int i = 0; i < 3; ++i) {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
  }
  second.need(true);
  EXPECT_EQ(second.settle(in(0ns)), outcome::late);
  first.arrive(reduce);
  EXPECT_EQ(now(first), outcome::late);
  for (int i = 0; i < 3; ++i) {
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  EXPECT_EQ(second.settle(in(0ns)), outcome::granted);
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  EXPECT_EQ(now(first), outcome::granted);
}

TEST_F(two_ranks, who_waits_goes_on_when_nobody_needs_it_any_more) {
  first.need(true);
  second.need(true);
  first.arrive(reduce);
  first.need(false);
  EXPECT_EQ(now(first), outcome::late);  // the other one does
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  while (shared->sleepers.load() == 0) {
    std::this_thread::yield();
  }
  second.need(false);
}

TEST_F(two_ranks, calls_that_differ_are_found_by_the_later_rank_where_nobody_waits) {
  numbered_call const other{2, 7, 100, 0};
  for (int i = 0; i < 20; ++i) {
    first.arrive(i == 5 ? other : reduce);
    first.launched();
  }
  for (int i = 0; i < 5; ++i) {
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 6U);
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
}

TEST(cut_word, is_packed_and_unpacked) {
  cut_word const word{0x1ff, true, 64, 64, (std::uint64_t{1} << 40U) - 1};
  EXPECT_EQ(cut_word::unpack(word.pack()), word);
  auto next = word;
  next.next_epoch();
  EXPECT_EQ(next.epoch, 0);
}

TEST_F(two_ranks_that_agree, a_number_is_granted_when_all_have_arrived) {
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

TEST_F(two_ranks_that_agree, a_pause_ends_the_grants_and_owes_what_was_granted) {
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

TEST_F(two_ranks_that_agree,
       a_new_epoch_drops_what_was_not_granted_and_numbers_go_on_from_the_cut) {
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

TEST_F(two_ranks_that_agree, an_arrival_of_an_earlier_epoch_does_not_count) {
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

TEST_F(two_ranks_that_agree, calls_that_differ_are_named_and_end_all_waits) {
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

TEST_F(two_ranks_that_agree, a_death_ends_all_waits_but_those_for_what_is_granted) {
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

TEST_F(two_ranks_that_agree, who_sleeps_is_woken) {
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
      : own_{shared, rank, ranks}, batches_{batches}, random_{std::random_device{}()} {
    own_.need(true);
  }

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

/// A rank that makes so many calls, and needs to be asked about them now and then.
class fickle_rank {
 public:
  fickle_rank(cut_memory& shared, unsigned rank, unsigned ranks, std::uint64_t calls)
      : shared_{shared}, rank_{rank}, own_{shared, rank, ranks}, calls_{calls} {}

  void train() {
    for (std::uint64_t call = 1; call <= calls_; ++call) {
      own_.arrive({call, 0, 0, 0});
      ASSERT_EQ(own_.await(in(60s)), outcome::granted);
      launched_.store(call);
      own_.launched();
    }
  }

  /// Until all have been made. While it needs to be asked, nobody has launched what is not granted.
  void need_it(std::atomic<bool> const& over,
               std::vector<std::unique_ptr<fickle_rank>> const& all) {
    std::minstd_rand random{rank_ + 1};
    while (!over.load()) {
      own_.need(true);
      for (auto looks = random() % 50; looks > 0; --looks) {
        std::uint64_t farthest = 0;
        for (auto const& one : all) {
          farthest = std::max(farthest, one->launched_.load());
        }
        ASSERT_LE(farthest, cut_word::unpack(shared_.word.load()).granted);
        std::this_thread::yield();
      }
      own_.need(false);
      ++times_;
      for (auto spins = random() % 50; spins > 0; --spins) {
        std::this_thread::yield();
      }
    }
  }

  [[nodiscard]] std::uint64_t launches() const noexcept { return launched_.load(); }
  [[nodiscard]] std::uint64_t times() const noexcept { return times_; }

 private:
  cut_memory& shared_;
  unsigned rank_;
  cut own_;
  std::uint64_t calls_;
  std::atomic<std::uint64_t> launched_{0};
  std::uint64_t times_ = 0;
};

TEST(cut_stress, what_is_launched_is_granted_whenever_a_rank_begins_to_need_that) {
  constexpr unsigned ranks = 3;
  auto const calls = 100 * from_environment("SLUICE_TEST_BATCHES", 300);
  auto const shared = std::make_unique<cut_memory>();
  std::vector<std::unique_ptr<fickle_rank>> all;
  for (unsigned rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<fickle_rank>(*shared, rank, ranks, calls));
  }
  std::atomic<bool> over{false};
  {
    std::vector<std::jthread> needing;
    std::vector<std::jthread> trainers;
    for (auto const& one : all) {
      needing.emplace_back([&] { one->need_it(over, all); });
    }
    while (cut_word::unpack(shared->word.load()).needed == 0) {
      std::this_thread::yield();  // else they may be done before anybody has needed it
    }
    for (auto const& one : all) {
      trainers.emplace_back([&one] { one->train(); });
    }
    trainers.clear();
    over = true;
  }
  for (auto const& one : all) {
    EXPECT_EQ(one->launches(), calls);
    EXPECT_GT(one->times(), 0U);
  }
  EXPECT_EQ(shared->differ.load(), 0U);
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
        own.need(true);
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
