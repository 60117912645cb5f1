/// The cut: numbers are granted when all have arrived, and a pause ends them for all at the same one.
#include "nccl_shim/cut.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/nccl_shim/places.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;
using testing::make_place;
using testing::place;
using testing::place_kind;

std::int64_t in(std::chrono::nanoseconds span) {
  return (std::chrono::steady_clock::now().time_since_epoch() + span).count();
}

constexpr numbered_call reduce{1, 7, 100, 0};

class two_ranks : public ::testing::TestWithParam<place_kind> {
 protected:
  [[nodiscard]] static outcome now(cut& of) { return of.await(in(0ns)); }

  std::unique_ptr<place> shared = make_place(GetParam());
  std::unique_ptr<cut_words> words_of_first = shared->words_of(0, 2);
  std::unique_ptr<cut_words> words_of_second = shared->words_of(1, 2);
  cut first{*words_of_first, 0, 2};
  cut second{*words_of_second, 1, 2};
};

/// Of whom one needs that both are asked.
class two_ranks_that_agree : public two_ranks {
 protected:
  two_ranks_that_agree() { first.need(true); }
};

TEST_P(two_ranks, nobody_waits_while_nobody_needs_it) {
  for (int i = 0; i < 5; ++i) {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks, the_first_that_needs_it_owes_what_the_other_has_launched) {
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

TEST_P(two_ranks, who_waits_goes_on_when_nobody_needs_it_any_more) {
  first.need(true);
  second.need(true);
  first.arrive(reduce);
  first.need(false);
  EXPECT_EQ(now(first), outcome::late);  // the other one does
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  shared->await_sleeper();
  second.need(false);
}

TEST_P(two_ranks, calls_that_differ_are_found_by_the_later_rank_where_nobody_waits) {
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

TEST_P(two_ranks, calls_that_differ_are_found_among_those_that_are_owed) {
  numbered_call const other{2, 7, 100, 0};
  first.arrive(other);
  EXPECT_EQ(now(first), outcome::granted);
  first.launched();
  second.need(true);
  second.arrive(reduce);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
}

class two_ranks_in_memory : public two_ranks {};

TEST_P(two_ranks_in_memory, what_nobody_needs_to_be_asked_about_is_passed_in_one_step) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(first.pass(reduce), passing::passed);
    first.launched();
  }
  EXPECT_EQ(first.number(), 3U);
  second.need(true);  // owes them
  EXPECT_EQ(first.pass(reduce), passing::refused);
  EXPECT_EQ(first.number(), 3U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(second.pass(reduce), passing::refused);
    second.arrive(reduce);
    EXPECT_EQ(now(second), outcome::granted);
    second.launched();
  }
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  first.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  EXPECT_EQ(now(first), outcome::granted);
}

TEST_P(two_ranks_in_memory, what_is_passed_belongs_to_the_epoch_that_there_is) {
  first.begin_epoch();
  EXPECT_EQ(first.pass(reduce), passing::passed);
  second.need(true);
  second.follow(second.epoch());
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::granted);
  second.launched();
  second.arrive(reduce);
  EXPECT_EQ(now(second), outcome::late);
  first.arrive(reduce);  // in the same epoch
  EXPECT_EQ(now(second), outcome::granted);
}

TEST_P(two_ranks_in_memory, a_call_that_differs_from_a_neighbours_is_arrived_at_but_not_passed) {
  numbered_call const other{2, 7, 100, 0};
  EXPECT_EQ(first.pass(other), passing::passed);
  first.launched();
  EXPECT_EQ(second.pass(reduce), passing::unclear);
  EXPECT_EQ(second.number(), 1U);
  EXPECT_EQ(now(second), outcome::differs);
  auto const found = second.difference();
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->calls, (std::array{other, reduce}));
  EXPECT_EQ(first.pass(other), passing::refused);
}

TEST_P(two_ranks_in_memory, nothing_is_passed_when_a_rank_has_died) {
  second.declare_lost(0);
  EXPECT_EQ(second.pass(reduce), passing::refused);
  EXPECT_EQ(second.number(), 0U);
}

TEST(cut_word, is_packed_and_unpacked) {
  cut_word const word{0x1ff, true, 64, 64, (std::uint64_t{1} << 40U) - 1};
  EXPECT_EQ(cut_word::unpack(word.pack()), word);
  auto next = word;
  next.next_epoch();
  EXPECT_EQ(next.epoch, 0);
}

TEST_P(two_ranks_that_agree, a_number_is_granted_when_all_have_arrived) {
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

TEST_P(two_ranks_that_agree, a_pause_ends_the_grants_and_owes_what_was_granted) {
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

TEST_P(two_ranks_that_agree,
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

TEST_P(two_ranks_that_agree, an_arrival_of_an_earlier_epoch_does_not_count) {
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

TEST_P(two_ranks_that_agree, calls_that_differ_are_named_and_end_all_waits) {
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

TEST_P(two_ranks_that_agree, a_death_ends_all_waits_but_those_for_what_is_granted) {
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

/// A rank's words, between whose looks at the word and at what is wrong something happens, once.
class slow_words final : public cut_words {
 public:
  explicit slow_words(cut_words& behind) : behind_{behind} {}
  void happens(std::function<void()> what) { happens_ = std::move(what); }

  [[nodiscard]] view look() noexcept override {
    view seen = behind_.look();
    if (auto const what = std::exchange(happens_, nullptr)) {
      what();
      std::uint64_t const word = seen.word;
      seen = behind_.look();
      seen.word = word;
    }
    return seen;
  }
  [[nodiscard]] bool exchange(std::uint64_t& seen, std::uint64_t made) noexcept override {
    return behind_.exchange(seen, made);
  }
  void arrive(std::uint64_t at, numbered_call const& what) noexcept override {
    behind_.arrive(at, what);
  }
  void arrivals(std::span<std::uint64_t> of_ranks) noexcept override { behind_.arrivals(of_ranks); }
  [[nodiscard]] numbered_call call_of(unsigned rank, std::uint64_t number) noexcept override {
    return behind_.call_of(rank, number);
  }
  [[nodiscard]] glance look_at_all(std::uint64_t at) noexcept override {
    return behind_.look_at_all(at);
  }
  [[nodiscard]] bool differs(unsigned neighbour, std::uint64_t number) noexcept override {
    return behind_.differs(neighbour, number);
  }
  void launched(std::uint64_t number) noexcept override { behind_.launched(number); }
  [[nodiscard]] std::uint64_t launched() noexcept override { return behind_.launched(); }
  void lose(unsigned rank) noexcept override { behind_.lose(rank); }
  void differ(std::uint64_t differ) noexcept override { behind_.differ(differ); }
  [[nodiscard]] std::uint32_t turn() noexcept override { return behind_.turn(); }
  void tell() noexcept override { behind_.tell(); }
  void wait(std::uint32_t seen, std::chrono::nanoseconds waited,
            std::chrono::nanoseconds at_most) noexcept override {
    behind_.wait(seen, waited, at_most);
  }
  [[nodiscard]] std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept override {
    return behind_.between_looks(waited);
  }

 private:
  cut_words& behind_;
  std::function<void()> happens_;
};

TEST_P(two_ranks_that_agree, what_was_granted_before_a_death_is_launched_by_who_sees_both_at_once) {
  slow_words slow{*words_of_second};
  cut late{slow, 1, 2};
  late.arrive(reduce);
  slow.happens([this] {
    first.arrive(reduce);
    EXPECT_EQ(now(first), outcome::granted);
    first.launched();
    first.declare_lost(0);
  });
  EXPECT_EQ(now(late), outcome::granted);
  late.launched();
  late.arrive(reduce);
  EXPECT_EQ(now(late), outcome::lost);
}

TEST_P(two_ranks_that_agree, who_sleeps_is_woken) {
  first.arrive(reduce);
  std::jthread const waiting{[this] { EXPECT_EQ(first.await(in(10s)), outcome::granted); }};
  shared->await_sleeper();
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

/// A rank that makes so many calls, and needs to be asked about them now and then.
class fickle_rank {
 public:
  fickle_rank(place& shared, unsigned rank, unsigned ranks, std::uint64_t calls)
      : words_{shared.words_of(rank, ranks)},
        rank_{rank},
        own_{*words_, rank, ranks},
        calls_{calls} {}

  void train() {
    for (std::uint64_t call = 1; call <= calls_; ++call) {
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

  /// Until all have been made. While it needs to be asked, nobody has launched what is not granted.
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
      ++times_;
      for (auto spins = random() % 50; spins > 0; --spins) {
        std::this_thread::yield();
      }
    }
  }

  [[nodiscard]] std::uint64_t launches() const noexcept { return launched_.load(); }
  [[nodiscard]] std::uint64_t times() const noexcept { return times_; }

 private:
  std::unique_ptr<cut_words> words_;
  unsigned rank_;
  cut own_;
  std::uint64_t calls_;
  std::atomic<std::uint64_t> launched_{0};
  std::uint64_t times_ = 0;
};

TEST_P(cut_stress, what_is_launched_is_granted_whenever_a_rank_begins_to_need_that) {
  constexpr unsigned ranks = 3;
  auto const shared = make_place(GetParam());
  auto const calls = shared->some_of(100 * from_environment("SLUICE_TEST_BATCHES", 300));
  auto const words = shared->words_of(0, ranks);
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
    while (cut_word::unpack(words->look().word).needed == 0) {
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

#ifdef SLUICE_WITH_TORCH
auto const everywhere = ::testing::Values(place_kind::memory, place_kind::store);
#else
auto const everywhere = ::testing::Values(place_kind::memory);
#endif
std::string name_of_case(::testing::TestParamInfo<place_kind> const& of) {
  return testing::name_of(of.param);
}
INSTANTIATE_TEST_SUITE_P(words, two_ranks, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, two_ranks_that_agree, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, two_ranks_in_memory, ::testing::Values(place_kind::memory),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(words, cut_stress, everywhere, name_of_case);
INSTANTIATE_TEST_SUITE_P(words, cut_processes, everywhere, name_of_case);

}  // namespace
}  // namespace sluice::nccl_shim
