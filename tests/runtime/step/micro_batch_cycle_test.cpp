/// The states of a micro-batch, with a gate that does what it is asked at once, and with the operators of the host.

#include "runtime/step/micro_batch_cycle.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/operator_gate.hpp"

namespace sluice::step {
namespace {

using namespace std::chrono_literals;

/// Of a device that never runs. A commit that is deferred lies here until the test takes it.
class plain_gate final : public launch_gate {
 public:
  bool close(std::int64_t /*deadline_ns*/) override { return true; }
  bool wait_idle(std::int64_t /*deadline_ns*/) override { return true; }
  void open() override {}
  void abort_begin() override { ++aborts; }
  void abort_end() override { ++abort_ends; }
  void set_urgent(bool /*urgent*/) override {}
  void flush() override { ++flushes; }
  bool defer_commit(int (*decide)(void* of), void* of) override {
    if (!defers) {
      return false;
    }
    decision = [decide, of] { return decide(of) != 0; };
    return true;
  }
  void end_commit(void (*made)(void* of), void* of) override {
    end = [made, of] { made(of); };
  }
  std::optional<bool> resolve_commit(std::int64_t /*deadline_ns*/) override {
    if (!decision) {
      return std::nullopt;
    }
    bool const counts = decision();
    if (counts && end) {
      end();
    }
    decision = nullptr;
    return counts;
  }
  bool keep(void (*agreed)(void* of), void* of) override {
    if (agrees) {
      agreed(of);
    }
    return agrees;
  }
  void run_again() override { ++runs_again; }

  bool defers = false, agrees = true;
  int aborts = 0, abort_ends = 0, flushes = 0, runs_again = 0;
  std::function<bool()> decision;
  std::function<void()> end;
};

class micro_batch_cycle_test : public testing::Test {
 protected:
  using lock = std::lock_guard<std::mutex>;

  void begin() {
    cycle_.await_last();
    lock const held{mutex_};
    cycle_.begin();
  }
  std::optional<std::chrono::nanoseconds> discard(bool has_arena = true) {
    lock const held{mutex_};
    cycle_.discard_begin();
    return cycle_.discard_end(has_arena);
  }
  bool revoke(std::int64_t at_ns = 0) {
    lock const held{mutex_};
    return cycle_.revoke(at_ns);
  }
  void starve() {
    lock const held{mutex_};
    cycle_.starve();
  }
  void run_again() {
    lock const held{mutex_};
    cycle_.run_again();
  }

  std::mutex mutex_;
  plain_gate gate_;
  std::vector<bool> committed_;  ///< with what each lived on
  micro_batch_cycle cycle_{mutex_, &gate_, gate_,
                           [this](bool outlived) { committed_.push_back(outlived); }};
};

TEST_F(micro_batch_cycle_test, what_is_begun_runs_and_is_committed) {
  EXPECT_TRUE(cycle_.is_idle());
  begin();
  EXPECT_TRUE(cycle_.is_running());
  EXPECT_EQ(cycle_.micro_batch(), 1U);
  EXPECT_FALSE(micro_batch_cycle::committing());

  ASSERT_EQ(cycle_.commit_begin(false), commit_start::begun);
  EXPECT_TRUE(cycle_.is_committing());
  EXPECT_TRUE(micro_batch_cycle::committing());
  EXPECT_EQ(gate_.flushes, 1);
  std::thread{[] { EXPECT_FALSE(micro_batch_cycle::committing()); }}.join();

  cycle_.commit_end(true);
  EXPECT_TRUE(cycle_.is_idle());
  EXPECT_FALSE(micro_batch_cycle::committing());
  EXPECT_EQ(committed_, std::vector<bool>{true});
}

TEST_F(micro_batch_cycle_test, what_has_lost_its_memory_is_discarded) {
  begin();
  EXPECT_TRUE(revoke());
  EXPECT_EQ(cycle_.state(), arena_state::revoked);
  EXPECT_EQ(cycle_.commit_begin(false), commit_start::taken_away);
  EXPECT_TRUE(discard().has_value());
  EXPECT_EQ(cycle_.state(), arena_state::sound);
  EXPECT_TRUE(cycle_.is_idle());
  EXPECT_TRUE(committed_.empty());

  begin();
  EXPECT_FALSE(discard().has_value()) << "of this one nothing was lost";
  EXPECT_EQ(cycle_.micro_batch(), 2U);
}

TEST_F(micro_batch_cycle_test, what_is_lost_first_counts_for_how_long_it_ran) {
  begin();
  auto const in = [](std::chrono::nanoseconds time) {
    return memhandover::monotonic_ns() + time.count();
  };
  EXPECT_TRUE(revoke(in(1h)));
  EXPECT_TRUE(revoke(in(9h)));
  auto const ran = discard();
  ASSERT_TRUE(ran.has_value());
  EXPECT_GE(*ran, 1h);
  EXPECT_LT(*ran, 9h);
}

TEST_F(micro_batch_cycle_test, without_an_arena_it_stays_lost_until_the_next_begins) {
  begin();
  EXPECT_TRUE(revoke());
  EXPECT_TRUE(discard(false).has_value());
  EXPECT_EQ(cycle_.state(), arena_state::revoked);
  begin();
  EXPECT_EQ(cycle_.state(), arena_state::sound);
}

TEST_F(micro_batch_cycle_test, an_arena_that_no_micro_batch_runs_in_is_nobodys_loss) {
  EXPECT_FALSE(revoke());
  EXPECT_EQ(cycle_.state(), arena_state::revoked);
  begin();
  ASSERT_EQ(cycle_.commit_begin(false), commit_start::begun);
  EXPECT_FALSE(revoke());
  cycle_.commit_end(false);
  EXPECT_EQ(gate_.aborts, 0);
  begin();
  EXPECT_FALSE(discard().has_value());
}

TEST_F(micro_batch_cycle_test, launches_of_a_starved_one_are_dropped) {
  starve();
  EXPECT_EQ(cycle_.state(), arena_state::starved);
  EXPECT_EQ(gate_.aborts, 0) << "none ran";
  begin();
  starve();
  EXPECT_EQ(gate_.aborts, 1);
  EXPECT_EQ(cycle_.commit_begin(false), commit_start::taken_away);
  EXPECT_TRUE(discard().has_value());
  cycle_.end_abort();
  EXPECT_EQ(gate_.abort_ends, 1);
}

TEST_F(micro_batch_cycle_test, others_hear_once_of_each_that_runs_again) {
  begin();
  run_again();
  EXPECT_EQ(gate_.runs_again, 0) << "it works alone";
  discard();
  cycle_.work_together(true);
  for (int tries = 1; tries <= 2; ++tries) {
    begin();
    starve();
    run_again();
    discard();
    EXPECT_EQ(gate_.runs_again, tries);
  }
  discard();
  EXPECT_EQ(gate_.runs_again, 2) << "none ran";
}

TEST_F(micro_batch_cycle_test, what_others_have_dropped_is_discarded_and_they_hear_nothing) {
  cycle_.work_together(true);
  begin();
  cycle_.drop([] { return false; });
  EXPECT_EQ(cycle_.state(), arena_state::sound) << "it was another one";
  cycle_.drop([] { return true; });
  EXPECT_EQ(cycle_.state(), arena_state::revoked);
  EXPECT_EQ(gate_.aborts, 1);
  EXPECT_TRUE(discard().has_value());
  EXPECT_EQ(gate_.runs_again, 0);
  cycle_.drop([] { return true; });
  EXPECT_EQ(cycle_.state(), arena_state::sound) << "none runs";
}

TEST_F(micro_batch_cycle_test, together_it_counts_only_if_all_keep_it) {
  gate_.defers = true;  // which they never do together
  cycle_.work_together(true);
  begin();
  gate_.agrees = false;
  EXPECT_EQ(cycle_.commit_begin(true), commit_start::taken_away);
  EXPECT_TRUE(cycle_.is_running());
  gate_.agrees = true;
  EXPECT_EQ(cycle_.commit_begin(true), commit_start::begun);
  EXPECT_TRUE(cycle_.is_committing());
  cycle_.commit_end(false);
}

TEST_F(micro_batch_cycle_test, a_deferred_commit_begins_when_the_gate_gets_there) {
  gate_.defers = true;
  begin();
  ASSERT_EQ(cycle_.commit_begin(true), commit_start::deferred);
  EXPECT_TRUE(cycle_.is_running());
  EXPECT_TRUE(micro_batch_cycle::committing());
  cycle_.commit_end(true);
  EXPECT_TRUE(cycle_.is_running());
  EXPECT_TRUE(committed_.empty());

  EXPECT_EQ(cycle_.commit_resolve(0), std::optional{true});
  EXPECT_EQ(committed_, std::vector<bool>{true});
  EXPECT_TRUE(cycle_.is_idle());
  EXPECT_EQ(cycle_.commit_resolve(0), std::optional{true}) << "nothing is deferred any more";
}

TEST_F(micro_batch_cycle_test, a_deferred_commit_does_not_count_if_memory_goes_before_it) {
  gate_.defers = true;
  begin();
  ASSERT_EQ(cycle_.commit_begin(true), commit_start::deferred);
  cycle_.commit_end(false);
  EXPECT_TRUE(revoke());
  EXPECT_EQ(cycle_.commit_resolve(0), std::optional{false});
  EXPECT_TRUE(committed_.empty());
  EXPECT_TRUE(discard().has_value());
}

TEST_F(micro_batch_cycle_test, a_deferred_commit_that_was_left_in_the_middle_ends_before_the_next) {
  gate_.defers = true;
  begin();
  ASSERT_EQ(cycle_.commit_begin(true), commit_start::deferred);
  begin();
  EXPECT_EQ(committed_, std::vector<bool>{true}) << "what it has made may live on";
  EXPECT_TRUE(cycle_.is_running());
  EXPECT_EQ(cycle_.micro_batch(), 2U);
}

TEST_F(micro_batch_cycle_test, who_waits_wakes_when_a_commit_is_reached_and_when_it_ends) {
  begin();
  int reached = 0;
  std::thread waiting{[&] {
    micro_batch_cycle::lock_type held{mutex_};
    reached += cycle_.wait_for(held, 1min, [this] { return cycle_.is_committing(); }) ? 1 : 0;
    reached += cycle_.wait_for(held, 1min, [this] { return cycle_.is_held_up(); }) ? 1 : 0;
    reached += cycle_.wait_for(held, 1min, [this] { return cycle_.is_idle(); }) ? 1 : 0;
  }};
  EXPECT_EQ(cycle_.commit_begin(false), commit_start::begun);
  auto const seen = [&](int count) {
    for (;;) {
      {
        lock const held{mutex_};
        if (reached >= count) {
          return;
        }
      }
      std::this_thread::yield();
    }
  };
  seen(1);
  {
    lock const held{mutex_};
    cycle_.hold_up();
  }
  cycle_.notify();
  seen(2);
  {
    lock const held{mutex_};
    cycle_.end_hold_up();
    EXPECT_FALSE(cycle_.is_held_up());
  }
  cycle_.commit_end(false);
  waiting.join();
  EXPECT_EQ(reached, 3);
}

TEST(micro_batch_cycle_on_host_test, there_is_nothing_to_drop_and_no_commit_is_deferred) {
  std::mutex mutex;
  operator_gate operators;
  int commits = 0;
  micro_batch_cycle cycle{mutex, nullptr, operators, [&](bool /*outlived*/) { ++commits; }};
  cycle.await_last();
  cycle.begin();
  EXPECT_FALSE(cycle.end_with(nullptr));
  EXPECT_EQ(cycle.commit_begin(true), commit_start::begun);
  cycle.commit_end(false);
  EXPECT_EQ(cycle.commit_resolve(0), std::optional{true});
  EXPECT_EQ(commits, 1);
  cycle.begin();
  cycle.starve();
  EXPECT_EQ(cycle.commit_begin(true), commit_start::taken_away);
  cycle.discard_begin();
  EXPECT_TRUE(cycle.discard_end(true).has_value());
  cycle.end_abort();
}

}  // namespace
}  // namespace sluice::step
