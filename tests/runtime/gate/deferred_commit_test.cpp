/// A commit that is left to the submitter: decided in its turn, and made or dropped as one whole.
#include <atomic>
#include <mutex>
#include <vector>

#include "tests/runtime/gate/submission_fixture.hpp"

namespace sluice::gate {
namespace {

/// A commit that is left to the submitter; `decide` and `made` write down when they are called.
class deferred_commit : public submission {
 protected:
  static constexpr int decided = 100;
  static constexpr int made = 200;

  ~deferred_commit() override { EXPECT_EQ(gate.commit_made(in(10s)), 1); }

  [[nodiscard]] int begin() {
    return gate.commit_begin(
        [](void* of) {
          auto& self = *static_cast<deferred_commit*>(of);
          self.begun_before_ = self.begun();
          put_down(decided);
          return self.counts_ ? 1 : 0;
        },
        this);
  }
  /// Leaves 1 before a commit, of which nobody knows how long it takes, and 2 in it.
  void leave() {
    static unsigned blocks = 1;
    close();
    note(1, nullptr, ++blocks);
    ASSERT_EQ(begin(), 1);
    note(2);
  }
  void end() const {
    gate.commit_end([](void*) { put_down(made); }, nullptr);
  }
  static void put_down(int number) {
    std::lock_guard const guard{written().lock};
    written().entries.push_back(number);
  }
  bool counts_ = true;
  std::atomic<std::uint64_t> begun_before_{0};  ///< kernels that had begun when it was decided
};

TEST_F(deferred_commit, it_is_decided_when_its_turn_comes_and_made_in_its_order) {
  leave();
  end();
  note(3);
  EXPECT_TRUE(take_entries().empty());
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
  note(4);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  auto seen = take_entries();
  // The device writes its entries down, the submitter the others.
  EXPECT_EQ(std::erase_if(seen, [](int one) { return one >= 100; }), 2);
  EXPECT_EQ(seen, numbers(1, 5));
}

TEST_F(deferred_commit, it_is_decided_before_the_last_short_launches_that_come_before_it) {
  auto const round =
      [this] {  // in which the kernel may be seen to take long, for lack of a processor
        for (int known = 0; known < 8; ++known) {
          note(-1);
          EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
        }
        auto const before = begun();
        close();
        note(1);
        note(2);
        note(3);
        EXPECT_EQ(begin(), 1);
        end();
        gate.open();
        EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
        EXPECT_EQ(gate.commit_made(in(10s)), 1);
        EXPECT_EQ(begun(), before + 3);
        return begun_before_ < before + 3;
      };
  int rounds = 0;
  while (!round()) {
    ASSERT_LT(++rounds, 100);
  }
}

TEST_F(deferred_commit, that_it_counts_is_known_before_it_has_been_made) {
  static std::uint64_t until = 0;
  until = static_cast<std::uint64_t>(in(1h));
  close();
  note(1);
  ASSERT_EQ(gate.commit_begin(
                [](void* of) {
                  static_cast<sluice_gate_api const*>(of)->set_pause_word(&until);
                  return 1;
                },
                const_cast<sluice_gate_api*>(&gate)),
            1);
  note(2);
  end();
  note(3);
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
  EXPECT_EQ(gate.commit_made(in(1ms)), 0);
  EXPECT_EQ(begin(), 0);  // one at a time
  gate.set_pause_word(nullptr);
  EXPECT_EQ(gate.commit_made(in(10s)), 1);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  auto seen = take_entries();
  EXPECT_EQ(std::erase(seen, made), 1);
  EXPECT_EQ(seen, numbers(1, 4));
}

TEST_F(deferred_commit, one_that_is_dropped_takes_all_with_it_that_came_before_it_was_resolved) {
  counts_ = false;
  leave();
  end();
  note(3);
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 0);
  note(4);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  auto seen = take_entries();
  EXPECT_EQ(std::erase(seen, decided), 1);
  EXPECT_EQ(seen, (std::vector{1, 4}));
}

TEST_F(deferred_commit, what_the_host_would_see_of_a_dropped_one_is_refused) {
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuda.allocate(&memory, 4096), CUDA_SUCCESS);
  counts_ = false;
  close();
  note(1);
  ASSERT_EQ(begin(), 1);
  auto const opening = thread([this] { gate.open(); });
  int seen = 0;
  EXPECT_EQ(cuda.copy_out(&seen, memory, sizeof(seen)), CUDA_ERROR_NOT_PERMITTED);
  note(2);
  end();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 0);
  EXPECT_EQ(cuda.copy_out(&seen, memory, sizeof(seen)), CUDA_SUCCESS);
  auto entries = take_entries();
  EXPECT_EQ(std::erase(entries, decided), 1);
  EXPECT_EQ(entries, numbers(1, 2));
  EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS);
}

TEST_F(deferred_commit, a_pause_spares_all_that_lies_before_its_end) {
  static std::uint64_t until = 0;
  until = static_cast<std::uint64_t>(in(1h));
  close();
  note(1);
  ASSERT_EQ(gate.commit_begin(
                [](void* of) {
                  auto const& table = *static_cast<sluice_gate_api const*>(of);
                  table.set_urgent(1);
                  table.set_pause_word(&until);
                  return 1;
                },
                const_cast<sluice_gate_api*>(&gate)),
            1);
  note(2);
  auto other = thread([this] { note(3); });  // not of the commit, but before its end
  other.join();
  end();
  note(4);
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
  EXPECT_TRUE(eventually_written(4));  // with the entry of its end
  gate.set_pause_word(nullptr);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  auto seen = take_entries();
  EXPECT_EQ(std::erase(seen, made), 1);
  EXPECT_EQ(seen, numbers(1, 5));
}

TEST_F(deferred_commit, one_that_is_not_left_has_nothing_before_it_that_a_pause_holds) {
  static std::uint64_t until = 0;
  until = static_cast<std::uint64_t>(in(1h));
  gate.set_pause_word(&until);
  auto other =
      thread([this] { note(1); });  // not of the commit, and left before what the commit launches
  other.join();
  gate.protect_thread(1);
  note(2);
  gate.set_urgent(1);
  EXPECT_TRUE(eventually_written(2));
  gate.set_urgent(0);
  gate.protect_thread(0);
  gate.set_pause_word(nullptr);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(1, 3));
}

TEST_F(deferred_commit, whoever_waits_for_it_can_look_up_meanwhile) {
  leave();
  end();
  EXPECT_EQ(gate.commit_resolve(in(1ms)), -1);
  note(3);
  EXPECT_EQ(gate.commit_resolve(in(0ms)), -1);
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
}

TEST_F(deferred_commit, whoever_does_not_wait_for_it_launches_for_himself) {
  counts_ = false;
  leave();
  end();
  EXPECT_EQ(gate.commit_resolve(in(0ms)), -1);
  note(3);  // not of the commit any more
  gate.open();
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  note(4);
  EXPECT_EQ(gate.commit_resolve(in(10s)), 0);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  auto seen = take_entries();
  EXPECT_EQ(std::erase(seen, decided), 1);
  EXPECT_EQ(seen, (std::vector{1, 3, 4}));
}

TEST_F(deferred_commit, with_nothing_before_it_it_can_be_decided_at_once) {
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(begin(), 0);
  gate.set_run_ahead(0);
  EXPECT_EQ(begin(), 0);
}

TEST_F(deferred_commit, a_second_thread_has_to_decide_its_own_at_once) {
  close();
  note(1);
  ASSERT_EQ(begin(), 1);
  auto second = thread([this] { EXPECT_EQ(begin(), 0); });
  second.join();
  end();
  gate.open();
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
}

TEST_F(deferred_commit, it_ends_though_the_bound_is_lifted_meanwhile) {
  for (int round = 0; round < 100; ++round) {
    leave();
    gate.set_run_ahead(0);
    auto const opening = thread([this] { gate.open(); });
    end();
    note(3);
    EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
    EXPECT_EQ(gate.commit_made(in(10s)), 1);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    auto seen = take_entries();
    EXPECT_EQ(std::erase_if(seen, [](int one) { return one >= 100; }), 2);
    EXPECT_EQ(seen, numbers(1, 4));
    gate.set_run_ahead(100'000);
    note(-1);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    take_entries();
  }
}

}  // namespace
}  // namespace sluice::gate
