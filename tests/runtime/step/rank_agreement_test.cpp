/// What ranks on the host ask each other, and what becomes of it when their memory is taken away.
#include "runtime/step/rank_agreement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/operator_gate.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;
using nccl_shim::numbered_call;
using nccl_shim::outcome;

constexpr numbered_call gather{1, 7, 100, 0};
constexpr numbered_call scatter{2, 7, 100, 0};
constexpr numbered_call end{3, 0, 0, 0};
constexpr std::int64_t never = std::int64_t{1} << 62U;

class rank_agreement_test : public ::testing::Test {
 protected:
  rank_agreement_test() {
    std::string name = ::testing::TempDir() + "sluice-ranks-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~rank_agreement_test() override { std::filesystem::remove_all(folder_); }

  /// As many ranks, each as if it were a process; besides the group of all, each is in those that name it.
  [[nodiscard]] std::vector<std::unique_ptr<rank_agreement>> joined(
      unsigned count, std::vector<std::vector<unsigned>> const& groups = {}) const {
    std::vector<std::unique_ptr<rank_agreement>> ranks;
    std::vector<std::vector<rank_agreement::place>> places(count);
    for (unsigned rank = 0; rank < count; ++rank) {
      std::vector<std::string> keys{"key"};
      places[rank].push_back({rank, count});
      for (std::size_t group = 0; group < groups.size(); ++group) {
        auto const at = std::ranges::find(groups[group], rank);
        if (at != groups[group].end()) {
          keys.push_back("key-" + std::to_string(group));
          places[rank].push_back({static_cast<unsigned>(at - groups[group].begin()),
                                  static_cast<unsigned>(groups[group].size())});
        }
      }
      ranks.push_back(rank_agreement::join(folder_.string(), keys));
    }
    for (unsigned rank = 0; rank < count; ++rank) {
      EXPECT_TRUE(ranks[rank]->complete(places[rank]));
    }
    return ranks;
  }
  [[nodiscard]] std::filesystem::path const& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
};

void ask(rank_agreement& rank, std::uint64_t micro_batch, numbered_call const& what,
         std::size_t group = 0) {
  rank.follow(micro_batch);
  rank.ask(what, group);
}

TEST_F(rank_agreement_test, what_all_have_come_to_is_granted) {
  auto const ranks = joined(2);
  ask(*ranks[0], 1, gather);
  EXPECT_EQ(ranks[0]->await(0), outcome::late);
  EXPECT_THAT(ranks[0]->missing(), ::testing::ElementsAre(1));
  EXPECT_TRUE(ranks[0]->is_open());
  ask(*ranks[1], 1, gather);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
  EXPECT_FALSE(ranks[0]->is_open());
  EXPECT_EQ(ranks[0]->number(), 1);
}

TEST_F(rank_agreement_test, ranks_that_mean_different_calls_hear_of_both) {
  auto const ranks = joined(2);
  ask(*ranks[0], 1, gather);
  ask(*ranks[1], 1, scatter);
  for (auto const& rank : ranks) {
    EXPECT_EQ(rank->await(never), outcome::differs);
    auto const found = rank->difference();
    ASSERT_TRUE(found);
    EXPECT_THAT(found->calls, ::testing::ElementsAre(gather, scatter));
  }
}

TEST_F(rank_agreement_test, nobody_is_granted_what_a_compute_pause_holds_back) {
  auto const ranks = joined(2);
  ask(*ranks[0], 1, gather);
  ranks[0]->hold(true);
  ask(*ranks[1], 1, gather);
  EXPECT_EQ(ranks[1]->await(0), outcome::late);
  ranks[0]->hold(false);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, what_has_been_granted_is_made_though_a_compute_pause_begins) {
  auto const ranks = joined(2);
  ask(*ranks[0], 1, gather);
  ask(*ranks[1], 1, gather);
  ranks[0]->hold(true);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  ranks[0]->made();
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
  ranks[1]->made();
  ask(*ranks[0], 1, scatter);  // the pause of the cut has not been left behind
  ask(*ranks[1], 1, scatter);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, all_run_a_micro_batch_again_that_one_does) {
  auto const ranks = joined(2);
  for (auto const& rank : ranks) {
    ask(*rank, 1, gather);
  }
  for (auto const& rank : ranks) {
    EXPECT_EQ(rank->await(0), outcome::granted);
    rank->made();
  }
  ranks[0]->run_again();
  ask(*ranks[0], 2, gather);
  ask(*ranks[1], 1, end);
  EXPECT_EQ(ranks[1]->await(0), outcome::dropped);
  EXPECT_EQ(ranks[0]->await(0), outcome::late);
  ask(*ranks[1], 2, gather);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, a_micro_batch_that_has_asked_nothing_yet_need_not_run_again) {
  auto const ranks = joined(2);
  ranks[0]->run_again();
  ask(*ranks[0], 2, gather);
  ask(*ranks[1], 1, gather);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, what_lies_between_micro_batches_is_asked_again) {
  auto const ranks = joined(2);
  ask(*ranks[0], 0, gather);
  ranks[1]->run_again();
  EXPECT_EQ(ranks[0]->await(0), outcome::dropped);
  ranks[0]->ask(gather);
  ask(*ranks[1], 0, gather);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, a_question_can_be_taken_back_until_it_is_granted) {
  auto const ranks = joined(2);
  ask(*ranks[0], 1, gather);
  EXPECT_FALSE(ranks[0]->withdraw());
  ask(*ranks[0], 2, gather);
  ask(*ranks[1], 1, gather);
  EXPECT_TRUE(ranks[0]->withdraw());
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, a_pause_waits_until_what_was_granted_has_been_made) {
  auto const ranks = joined(2);
  for (auto const& rank : ranks) {
    ask(*rank, 1, gather);
  }
  ranks[0]->pause();
  EXPECT_FALSE(ranks[0]->await_debts(0));
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  ranks[0]->made();
  EXPECT_TRUE(ranks[0]->await_debts(0));
  ask(*ranks[0], 1, scatter);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
  ranks[1]->made();
  ask(*ranks[1], 1, scatter);
  EXPECT_EQ(ranks[1]->await(0), outcome::late);
  ranks[0]->resume();
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, a_closed_gate_lets_pass_what_was_granted) {
  auto const ranks = joined(2);
  operator_gate gate;
  gate.agree_with(*ranks[0]);
  for (auto const& rank : ranks) {
    ask(*rank, 1, gather);
  }
  ASSERT_TRUE(gate.close(0));
  EXPECT_FALSE(gate.wait_idle(0));
  ASSERT_EQ(ranks[0]->await(0), outcome::granted);
  gate.operator_pass();
  ranks[0]->made();
  EXPECT_FALSE(gate.wait_idle(0));
  gate.operator_end();
  EXPECT_TRUE(gate.wait_idle(monotonic_ns()));
  gate.open();
}

TEST_F(rank_agreement_test, a_gate_that_is_closed_twice_pauses_once) {
  auto const ranks = joined(2);
  operator_gate gate;
  gate.agree_with(*ranks[0]);
  ASSERT_TRUE(gate.close_all(never));
  ASSERT_TRUE(gate.close(never));
  gate.open();
  ask(*ranks[0], 1, gather);
  ask(*ranks[1], 1, gather);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, a_group_agrees_without_the_others) {
  auto const ranks = joined(3, {{0, 1}, {1, 2}});
  ask(*ranks[0], 1, gather, 1);
  ask(*ranks[1], 1, gather, 1);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
  ask(*ranks[1], 1, scatter, 2);
  EXPECT_EQ(ranks[1]->await(0), outcome::late);
  EXPECT_THAT(ranks[1]->missing(), ::testing::ElementsAre(1));  // counted in the group
  ask(*ranks[2], 1, scatter, 1);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, who_waits_in_a_group_runs_again_what_somebody_outside_of_it_does) {
  auto const ranks = joined(3, {{0, 1}});
  for (auto const& rank : ranks) {
    ask(*rank, 1, gather);
  }
  for (auto const& rank : ranks) {
    EXPECT_EQ(rank->await(0), outcome::granted);
    rank->made();
  }
  ask(*ranks[0], 1, scatter, 1);
  ranks[2]->run_again();
  EXPECT_EQ(ranks[0]->await(never), outcome::dropped);
  ask(*ranks[1], 1, scatter, 1);  // in the old epoch
  EXPECT_EQ(ranks[1]->await(never), outcome::dropped);
  ask(*ranks[0], 2, scatter, 1);
  ask(*ranks[1], 2, scatter, 1);
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
}

TEST_F(rank_agreement_test, what_is_taken_back_in_a_group_is_dropped_for_all) {
  for (bool const inside : {true, false}) {
    auto const ranks = joined(3, {{0, 1}});
    std::uint64_t const first = inside ? 1 : 0;
    ask(*ranks[0], first, scatter, 1);
    ask(*ranks[2], 1, end);
    EXPECT_FALSE(ranks[0]->withdraw());
    ask(*ranks[1], first, scatter, 1);
    EXPECT_EQ(ranks[1]->await(0), outcome::late);
    EXPECT_EQ(ranks[2]->await(0), outcome::dropped);
  }
}

TEST_F(rank_agreement_test, a_pause_holds_all_groups) {
  auto const ranks = joined(3, {{0, 1}});
  ranks[0]->pause();
  ask(*ranks[0], 1, gather, 1);
  ask(*ranks[1], 1, gather, 1);
  EXPECT_EQ(ranks[1]->await(0), outcome::late);
  EXPECT_TRUE(ranks[0]->await_debts(0));
  ranks[0]->resume();
  EXPECT_EQ(ranks[1]->await(0), outcome::granted);
  ranks[0]->pause();  // after the grant
  EXPECT_FALSE(ranks[0]->await_debts(0));
  EXPECT_EQ(ranks[0]->await(0), outcome::granted);
  ranks[0]->made();
  EXPECT_TRUE(ranks[0]->await_debts(0));
  ranks[0]->resume();
}

TEST_F(rank_agreement_test, whoever_waits_for_a_rank_that_dies_hears_which) {
  std::array const key{std::string{"key"}};
  auto own = rank_agreement::join(folder().string(), key);
  std::array<int, 2> said{};
  ASSERT_EQ(::pipe(said.data()), 0);
  pid_t const other = ::fork();
  if (other == 0) {
    auto const theirs = rank_agreement::join(folder().string(), key);
    char const done =
        theirs != nullptr && theirs->complete(std::array{rank_agreement::place{1, 2}}) ? '1' : '0';
    static_cast<void>(::write(said[1], &done, 1));
    for (;;) {
      ::pause();
    }
  }
  char done = 0;
  ASSERT_EQ(::read(said[0], &done, 1), 1);
  ASSERT_EQ(done, '1');
  ASSERT_TRUE(own->complete(std::array{rank_agreement::place{0, 2}}));
  ask(*own, 1, gather);
  EXPECT_EQ(own->await(0), outcome::late);
  ASSERT_EQ(::kill(other, SIGKILL), 0);
  ASSERT_EQ(::waitpid(other, nullptr, 0), other);
  EXPECT_EQ(own->await(never), outcome::lost);
  EXPECT_EQ(own->loss(), "rank 1 has died");
  for (int const end_of_pipe : said) {
    ::close(end_of_pipe);
  }
}

/// A rank's two threads: one trains, the other takes its memory.
class disturbed_rank {
 public:
  using call = std::pair<numbered_call, std::size_t>;  ///< of a group

  disturbed_rank(rank_agreement& ranks, std::vector<call> calls, unsigned seed)
      : ranks_{ranks}, calls_{std::move(calls)}, dice_{seed} {
    gate_.agree_with(ranks);
  }

  /// Keeps that many micro-batches. Returns the numbers of their ends.
  [[nodiscard]] std::vector<std::uint64_t> train(unsigned count) {
    std::vector<std::uint64_t> kept;
    std::uint64_t tries = 0;
    while (kept.size() < count) {
      ++tries;
      sound_ = true;
      bool whole = true;
      for (auto const& [what, group] : calls_) {
        whole = whole && make(tries, what, group);
      }
      if (whole) {
        kept.push_back(ranks_.number());
      } else {
        ++discards_;
      }
    }
    over_ = true;
    return kept;
  }

  /// Until the other is done: now and then, by what it has made meanwhile, and then by chance. Each pause must find this
  /// rank at rest.
  void disturb() {
    unsigned seen = 0;
    while (!over_) {
      std::uniform_int_distribution<int> shares{0, 40};
      for (unsigned const more = static_cast<unsigned>(shares(dice_)) / 4;
           made_ < seen + more && !over_;) {
        std::this_thread::yield();
      }
      seen = made_;
      for (int share = shares(dice_); share > 0; --share) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(gate_.close(never));
      EXPECT_TRUE(gate_.wait_idle(never));
      EXPECT_FALSE(makes_);
      if (shares(dice_) % 2 == 0 && sound_.exchange(false)) {
        gate_.run_again();
      }
      EXPECT_FALSE(makes_);
      gate_.open();
    }
  }

  [[nodiscard]] unsigned discards() const { return discards_; }

 private:
  [[nodiscard]] bool make(std::uint64_t micro_batch, numbered_call const& what, std::size_t group) {
    ranks_.follow(micro_batch);
    if (!sound_) {
      return false;
    }
    ranks_.ask(what, group);
    if (ranks_.await(never) != outcome::granted) {
      return false;
    }
    gate_.operator_pass();
    makes_ = true;
    std::this_thread::yield();
    EXPECT_TRUE(sound_);  // memory goes before something is granted, or when it has been made
    makes_ = false;
    ++made_;
    gate_.operator_end();
    ranks_.made();
    return true;
  }

  rank_agreement& ranks_;
  std::vector<call> calls_;
  operator_gate gate_;
  std::mt19937 dice_;
  std::atomic<bool> sound_{true};
  std::atomic<bool> makes_{false};
  std::atomic<unsigned> made_{0};
  std::atomic<bool> over_{false};
  unsigned discards_ = 0;
};

/// Ranks that make these calls in each micro-batch, and keep the same ones.
void expect_the_same_kept(std::vector<std::unique_ptr<rank_agreement>> const& ranks,
                          std::vector<std::vector<disturbed_rank::call>> const& calls,
                          unsigned micro_batches) {
  auto const count = static_cast<unsigned>(ranks.size());
  std::vector<std::unique_ptr<disturbed_rank>> all;
  std::vector<std::vector<std::uint64_t>> kept(count);
  {
    std::vector<std::jthread> threads;
    for (unsigned rank = 0; rank < count; ++rank) {
      all.push_back(std::make_unique<disturbed_rank>(*ranks[rank], calls[rank], rank));
    }
    for (unsigned rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] { kept[rank] = all[rank]->train(micro_batches); });
      threads.emplace_back([&, rank] { all[rank]->disturb(); });
    }
  }
  EXPECT_THAT(kept, ::testing::Each(kept[0]));
  EXPECT_GT(all[0]->discards(), 0);
}

TEST_F(rank_agreement_test, ranks_that_lose_their_memory_at_random_keep_the_same_micro_batches) {
  std::vector<disturbed_rank::call> const calls{{gather, 0}, {scatter, 0}, {gather, 0}, {end, 0}};
  expect_the_same_kept(joined(3), {calls, calls, calls}, 2000);
}

TEST_F(rank_agreement_test, so_do_ranks_that_work_together_in_groups) {
  // Shards {0, 1} and {2, 3}, replicas {0, 2} and {1, 3}.
  std::vector<disturbed_rank::call> const calls{{gather, 1}, {scatter, 1}, {gather, 2}, {end, 0}};
  expect_the_same_kept(joined(4, {{0, 1}, {2, 3}, {0, 2}, {1, 3}}), {calls, calls, calls, calls},
                       500);
}

TEST_F(rank_agreement_test, and_those_of_which_some_are_in_no_group) {
  std::vector<disturbed_rank::call> const grouped{
      {gather, 1}, {scatter, 0}, {scatter, 1}, {end, 0}};
  std::vector<disturbed_rank::call> const alone{{scatter, 0}, {end, 0}};
  expect_the_same_kept(joined(3, {{0, 1}}), {grouped, grouped, alone}, 500);
}

}  // namespace
}  // namespace sluice::step
