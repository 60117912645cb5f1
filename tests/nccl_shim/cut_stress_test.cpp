/// The cut among threads and processes that pause, need it and die at random instants.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "nccl_shim/agreement/cut.hpp"
#include "tests/from_environment.hpp"
#include "tests/nccl_shim/places.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;
using testing::everywhere;
using testing::in;
using testing::make_place;
using testing::name_of_case;
using testing::place;
using testing::place_kind;

/// A rank that trains in micro-batches with collectives inside, and whoever pauses it.
class training_rank {
 public:
  struct launch {
    std::uint64_t number, batch, item;
    bool operator==(launch const&) const = default;
  };
  static constexpr std::uint64_t inside = 3;

  training_rank(place& shared, unsigned rank, unsigned ranks, std::uint64_t batches)
      : words_{shared.words_of(rank, ranks)},
        own_{*words_, rank, ranks},
        batches_{batches},
        random_{std::random_device{}()} {
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
  std::unique_ptr<cut_words> words_;
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
disturbance train_and_pause(place_kind where, std::uint64_t batches) {
  constexpr unsigned ranks = 4;
  auto const shared = make_place(where);
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

class cut_stress : public ::testing::TestWithParam<place_kind> {};

TEST_P(cut_stress, all_ranks_launch_the_same_whenever_they_are_paused) {
  auto const batches =
      make_place(GetParam())->some_of(from_environment("SLUICE_TEST_BATCHES", 300));
  disturbance all;
  // On few processors the ranks may be done before anybody has paused them.
  for (int round = 0; (all.pauses < batches / 10 || all.dropped == 0) && !HasFailure(); ++round) {
    ASSERT_LT(round, 1000);
    auto const seen = train_and_pause(GetParam(), batches);
    all.pauses += seen.pauses;
    all.dropped += seen.dropped;
  }
}

/// A rank that makes calls, and needs to be asked about them now and then.
class fickle_rank {
 public:
  fickle_rank(place& shared, unsigned rank, unsigned ranks)
      : words_{shared.words_of(rank, ranks)}, rank_{rank}, own_{*words_, rank, ranks} {}

  /// Makes so many more.
  void train(std::uint64_t calls) {
    std::uint64_t const first = launched_.load() + 1;
    for (std::uint64_t call = first; call < first + calls; ++call) {
      numbered_call const what{call, 0, 0, 0};
      auto const became = own_.pass(what);
      if (became == passing::refused) {
        own_.arrive(what);
      }
      if (became != passing::passed) {
        ASSERT_EQ(own_.await(in(60s)), outcome::granted);
      }
      launched_.store(call);
      own_.launched();
    }
  }

  /// Until it is over. While it needs to be asked, nobody has launched what is not granted.
  void need_it(std::atomic<bool> const& over,
               std::vector<std::unique_ptr<fickle_rank>> const& all) {
    std::minstd_rand random{rank_ + 1};
    while (!over.load()) {
      own_.need(true);
      while (cut_word::unpack(words_->look().word).catching_up) {
        std::this_thread::yield();  // another one was the first
      }
      for (auto looks = random() % 50; looks > 0; --looks) {
        std::uint64_t farthest = 0;
        for (auto const& one : all) {
          farthest = std::max(farthest, one->launched_.load());
        }
        ASSERT_LE(farthest, cut_word::unpack(words_->look().word).granted);
        std::this_thread::yield();
      }
      own_.need(false);
      times_.fetch_add(1);
      for (auto spins = random() % 50; spins > 0; --spins) {
        std::this_thread::yield();
      }
    }
  }

  [[nodiscard]] std::uint64_t launches() const noexcept { return launched_.load(); }
  [[nodiscard]] std::uint64_t times() const noexcept { return times_.load(); }

 private:
  std::unique_ptr<cut_words> words_;
  unsigned rank_;
  cut own_;
  std::atomic<std::uint64_t> launched_{0};
  std::atomic<std::uint64_t> times_{0};
};

TEST_P(cut_stress, what_is_launched_is_granted_whenever_a_rank_begins_to_need_that) {
  constexpr unsigned ranks = 3;
  auto const shared = make_place(GetParam());
  auto const calls = shared->some_of(100 * from_environment("SLUICE_TEST_BATCHES", 300));
  auto const words = shared->words_of(0, ranks);
  std::vector<std::unique_ptr<fickle_rank>> all;
  for (unsigned rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<fickle_rank>(*shared, rank, ranks));
  }
  constexpr std::uint64_t often = 10;
  auto const have_needed_it = [&all] {
    return std::all_of(all.begin(), all.end(),
                       [](auto const& one) { return one->times() >= often; });
  };
  std::atomic<bool> over{false};
  std::uint64_t rounds = 0;
  {
    std::vector<std::jthread> needing;
    for (auto const& one : all) {
      needing.emplace_back([&] { one->need_it(over, all); });
    }
    // On few processors they may be done before all have needed it.
    while (rounds == 0 || (!have_needed_it() && rounds < 1000 && !HasFailure())) {
      std::vector<std::jthread> trainers;
      for (auto const& one : all) {
        trainers.emplace_back([&] { one->train(calls); });
      }
      ++rounds;
    }
    over = true;
  }
  for (auto const& one : all) {
    EXPECT_EQ(one->launches(), rounds * calls);
    EXPECT_GE(one->times(), often);
  }
  EXPECT_EQ(words->look().differ, 0U);
}

class cut_processes : public ::testing::TestWithParam<place_kind> {};

TEST_P(cut_processes, the_others_leave_their_waits_when_a_rank_is_killed) {
  constexpr unsigned ranks = 3;
  std::mt19937 random{std::random_device{}()};
  auto const kills = make_place(GetParam())->some_of(from_environment("SLUICE_TEST_KILLS", 20));
  for (std::uint64_t round = kills; round > 0; --round) {
    auto const shared = make_place(GetParam());
    auto const words = shared->words_of(0, ranks);
    auto const far = shared->some_of(random() % 2000);
    std::vector<pid_t> pids;
    for (unsigned rank = 0; rank < ranks; ++rank) {
      pid_t const pid = ::fork();
      if (pid == 0) {
        auto const own_words = shared->words_of(rank, ranks);
        cut own{*own_words, rank, ranks};
        own.need(true);
        for (;;) {
          own.arrive({1, 7, 100, 0});
          auto const became = own.await(in(60s));
          if (became != outcome::granted) {
            ::_exit(became == outcome::lost && own.lost() == 1U ? 0 : 1);
          }
          own.launched();
        }
      }
      pids.push_back(pid);
    }
    while (cut_word::unpack(words->look().word).granted < far) {
      std::this_thread::yield();
    }
    ASSERT_EQ(::kill(pids[1], SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(pids[1], &status, 0), pids[1]);
    cut{*words, 0, ranks}.declare_lost(1);
    for (unsigned const rank : {0U, 2U}) {
      ASSERT_EQ(::waitpid(pids[rank], &status, 0), pids[rank]);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(words, cut_stress, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, cut_processes, everywhere, name_of_case);

}  // namespace
}  // namespace sluice::nccl_shim
