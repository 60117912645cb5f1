/// Holding, refusing and letting through.
#include <atomic>
#include <cerrno>
#include <latch>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

class gating : public gate_test {
 protected:
  std::uint64_t begun() const { return driver.calls("cuLaunchKernel"); }
  CUfunction quick = kernel(0ns);
};

TEST_F(gating, an_open_gate_lets_launches_through_and_counts_them) {
  std::uint64_t const before = gate.launches();
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(launch(quick), CUDA_SUCCESS);
  }
  EXPECT_EQ(gate.launches(), before + 10);
}

TEST_F(gating, launches_of_ended_threads_stay_counted) {
  std::uint64_t const before = gate.launches();
  for (int i = 0; i < 20; ++i) {
    auto const one = thread([this] { EXPECT_EQ(launch(quick), CUDA_SUCCESS); });
  }
  EXPECT_EQ(gate.launches(), before + 20);
}

TEST_F(gating, close_waits_for_the_thread_that_is_inside) {
  driver.delay("cuLaunchKernel", std::chrono::nanoseconds{50ms}.count());
  auto const launcher = thread([this] { EXPECT_EQ(launch(quick), CUDA_SUCCESS); });
  ASSERT_TRUE(eventually([this] { return driver.inside("cuLaunchKernel") == 1; }));
  ASSERT_EQ(gate.close(in(10s)), 0);
  EXPECT_EQ(driver.inside("cuLaunchKernel"), 0U);
}

TEST_F(gating, close_gives_up_at_its_deadline_and_leaves_the_gate_open) {
  driver.delay("cuLaunchKernel", std::chrono::nanoseconds{2s}.count());
  auto const launcher = thread([this] { EXPECT_EQ(launch(quick), CUDA_SUCCESS); });
  ASSERT_TRUE(eventually([this] { return driver.inside("cuLaunchKernel") == 1; }));
  EXPECT_EQ(gate.close(in(5ms)), ETIMEDOUT);
  driver.delay("cuLaunchKernel", 0);
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
}

TEST_F(gating, a_held_launch_goes_on_when_the_gate_opens) {
  ASSERT_EQ(gate.close(in(1s)), 0);
  std::uint64_t const before = begun();
  std::latch started{1};
  std::atomic<bool> done{false};
  auto const launcher = thread([&] {
    started.count_down();
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
    done = true;
  });
  started.wait();
  let_others_run();
  EXPECT_FALSE(done);
  EXPECT_EQ(begun(), before);
  gate.open();
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  EXPECT_EQ(begun(), before + 1);
}

TEST_F(gating, closing_a_closed_gate_and_opening_an_open_one_changes_nothing) {
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.close(in(1s)), 0);
  gate.open();
  gate.open();
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
}

TEST_F(gating, an_exempt_thread_is_neither_held_nor_waited_for) {
  driver.delay("cuLaunchKernel", std::chrono::nanoseconds{2s}.count());
  auto const other = thread([this] {
    gate.exempt_thread(1);
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  });
  ASSERT_TRUE(eventually([this] { return driver.inside("cuLaunchKernel") == 1; }));
  ASSERT_EQ(gate.close(in(10s)), 0);
  EXPECT_EQ(driver.inside("cuLaunchKernel"), 1U);
  driver.delay("cuLaunchKernel", 0);
  gate.exempt_thread(1);
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  gate.abort_begin();
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
}

TEST_F(gating, launches_of_an_expendable_thread_are_dropped_and_what_the_host_reads_is_refused) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuda.allocate(&memory, 4096), CUDA_SUCCESS);
  auto const copy_out = gate_library().get<decltype(&cuMemcpyDtoH)>("cuMemcpyDtoH_v2");
  std::uint64_t const before = begun();
  std::uint64_t const counted = gate.launches();
  gate.expendable_thread(1);
  gate.abort_begin();
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  std::uint64_t value = 0;
  EXPECT_EQ(copy_out(&value, memory, sizeof(value)), CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(begun(), before);
  EXPECT_EQ(gate.launches(), counted);
  gate.abort_end();
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  EXPECT_EQ(begun(), before + 1);
}

TEST_F(gating, an_abort_concerns_only_threads_that_said_they_are_expendable) {
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuda.allocate(&memory, 4096), CUDA_SUCCESS);
  gate.expendable_thread(1);
  gate.abort_begin();
  std::uint64_t const before = begun();
  auto other = thread([&] {
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
    std::uint64_t value = 0;
    EXPECT_EQ(cuda.copy_out(&value, memory, sizeof(value)), CUDA_SUCCESS);
  });
  other.join();
  EXPECT_EQ(begun(), before + 1);
  gate.expendable_thread(0);
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  EXPECT_EQ(begun(), before + 2);
}

TEST_F(gating, a_held_launch_is_dropped_when_the_gate_opens_aborting) {
  ASSERT_EQ(gate.close(in(1s)), 0);
  std::uint64_t const before = begun();
  std::latch started{1};
  std::atomic<int> result{-1};
  auto const launcher = thread([&] {
    gate.expendable_thread(1);
    started.count_down();
    result = launch(quick);
  });
  started.wait();
  gate.abort_begin();
  gate.open();
  ASSERT_TRUE(eventually([&] { return result != -1; }));
  EXPECT_EQ(result, CUDA_SUCCESS);
  EXPECT_EQ(begun(), before);
}

TEST_F(gating, a_compute_pause_holds_launches_until_it_expires) {
  std::uint64_t const until = static_cast<std::uint64_t>(in(30ms));
  std::uint64_t const volatile word = until;
  gate.set_pause_word(&word);
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  EXPECT_GE(static_cast<std::uint64_t>(in(0ns)), until);
  auto const start = clock::now();
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);  // an expired word holds nobody
  EXPECT_LT(clock::now() - start, 60s);
}

TEST_F(gating, taking_a_compute_pause_back_lets_launches_go_on) {
  std::uint64_t volatile word = static_cast<std::uint64_t>(in(1h));
  gate.set_pause_word(&word);
  std::uint64_t const before = begun();
  std::latch started{1};
  std::atomic<bool> done{false};
  auto const launcher = thread([&] {
    started.count_down();
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
    done = true;
  });
  started.wait();
  let_others_run();
  EXPECT_EQ(begun(), before);
  __atomic_store_n(&word, 0, __ATOMIC_RELEASE);
  EXPECT_TRUE(eventually([&] { return done.load(); }));
}

TEST_F(gating, a_paused_thread_does_not_delay_close) {
  std::uint64_t volatile word = static_cast<std::uint64_t>(in(1h));
  gate.set_pause_word(&word);
  std::latch started{1};
  auto launcher = thread([&] {
    gate.expendable_thread(1);
    started.count_down();
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  });
  started.wait();
  EXPECT_EQ(gate.close(in(10s)), 0);
  std::uint64_t const before = begun();
  gate.abort_begin();
  gate.open();  // an abort ends a pause, too
  launcher.join();
  EXPECT_EQ(begun(), before);
}

TEST_F(gating, a_pause_holds_a_thread_that_commits_only_until_a_demand_waits_for_it) {
  std::uint64_t volatile word = static_cast<std::uint64_t>(in(1h));
  gate.set_pause_word(&word);
  std::uint64_t const before = begun();
  std::latch started{1};
  std::atomic<bool> done{false};
  auto const committer = thread([&] {
    gate.protect_thread(1);
    started.count_down();
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
    done = true;
  });
  started.wait();
  let_others_run();
  EXPECT_EQ(begun(), before);
  gate.set_urgent(1);
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  EXPECT_EQ(begun(), before + 1);
}

TEST_F(gating, a_failing_driver_call_leaves_the_thread_outside) {
  driver.fail("cuLaunchKernel", CUDA_ERROR_LAUNCH_FAILED, 0);
  EXPECT_EQ(launch(quick), CUDA_ERROR_LAUNCH_FAILED);
  driver.fail("cuLaunchKernel", 0, 0);
  EXPECT_EQ(gate.close(in(1s)), 0);
}

/// A demand in shared memory: {number, chunks}.
class demanding : public gating {
 protected:
  demanding() { gate.set_demand_word(&word_); }
  ~demanding() override { gate.set_demand_word(nullptr); }
  demanding(demanding const&) = delete;
  demanding& operator=(demanding const&) = delete;

  std::uint64_t demand(std::uint64_t chunks) {
    std::uint64_t const next = (word_ >> 32U) + 1;
    __atomic_store_n(&word_, next << 32U | chunks, __ATOMIC_RELEASE);
    return word_;
  }

 private:
  static inline std::uint64_t volatile word_ = 0;  // stays mapped: a thread may be about to read it
};

TEST_F(demanding, a_demand_holds_launches_until_it_is_answered_and_is_seen_by_who_is_held) {
  std::uint64_t const asked = demand(3);
  EXPECT_EQ(gate.demand_seen(), 0);
  auto const before = in(0ns);
  std::atomic<bool> done{false};
  auto const launcher = thread([&] {
    EXPECT_EQ(launch(quick), CUDA_SUCCESS);
    done = true;
  });
  ASSERT_TRUE(eventually([this] { return gate.demand_seen() != 0; }));
  EXPECT_GE(gate.demand_seen(), before);
  EXPECT_FALSE(done);
  gate.demand_answered(asked);
  EXPECT_TRUE(eventually([&] { return done.load(); }));
}

TEST_F(demanding, a_withdrawn_demand_holds_nobody) {
  static_cast<void>(demand(3));
  static_cast<void>(demand(0));
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  EXPECT_EQ(gate.demand_seen(), 0);
}

TEST_F(demanding, a_commit_goes_on_beside_a_demand) {
  static_cast<void>(demand(1));
  gate.protect_thread(1);
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  gate.protect_thread(0);
}

TEST_F(demanding, a_demand_that_nobody_answers_does_not_hold_for_ever) {
  static_cast<void>(demand(1));
  EXPECT_EQ(launch(quick), CUDA_SUCCESS);
  EXPECT_NE(gate.demand_seen(), 0);
}

}  // namespace
}  // namespace sluice::gate
