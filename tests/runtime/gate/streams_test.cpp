/// Bounded run-ahead, and waiting until the device is idle.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <latch>
#include <utility>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

std::atomic<int> finished{0};
std::atomic<bool> may_end{false};

void count_finished(void** /*parameters*/) {
  finished.fetch_add(1);
}

class streams : public gate_test {
 protected:
  streams() { finished = 0; }
};

/// A bound that a few launches exceed, whatever they are.
constexpr std::int64_t hardly_any = 1000;
constexpr int more_than_fit = 8;

TEST_F(streams, run_ahead_bounds_the_work_that_is_outstanding) {
  CUstream const on = stream();
  CUfunction const slow = kernel(200us);
  constexpr std::chrono::nanoseconds bound = 2ms;
  gate.set_run_ahead(bound.count());
  for (int i = 0; i < 20; ++i) {  // until the kernel has been measured
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
  static_cast<void>(driver.outstanding_peak());
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  // Launches within the bound and the one that is let in at its edge, and the events between them.
  EXPECT_LE(driver.outstanding_peak(), 2 * (bound / 200us + 2));
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);

  gate.set_run_ahead(0);
  static_cast<void>(driver.outstanding_peak());
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  EXPECT_GT(driver.outstanding_peak(), 100U);
}

TEST_F(streams, little_of_what_nobody_has_measured_is_outstanding) {
  CUstream const on = stream();
  gate.set_run_ahead(std::chrono::nanoseconds{1ms}.count());
  static_cast<void>(driver.outstanding_peak());
  for (int i = 0; i < 40; ++i) {
    ASSERT_EQ(launch(kernel(1ms), on), CUDA_SUCCESS);  // each is another kernel
  }
  EXPECT_LE(driver.outstanding_peak(), 3 * 6U);  // a launch and two events
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
}

TEST_F(streams, what_takes_longer_than_the_bound_is_known_by_its_name) {
  CUstream const on = stream();
  CUfunction const slow = kernel(7ms);
  CUfunction const quick = kernel(50us);
  gate.set_run_ahead(std::chrono::nanoseconds{500us}.count());
  for (int i = 0; i < 12; ++i) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
    ASSERT_EQ(launch(quick, on), CUDA_SUCCESS);
  }
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
  std::vector<sluice_gate_long_unit> units(1);
  while (gate.long_unit(units.size() - 1, &units.back()) != 0) {
    units.emplace_back();
  }
  units.pop_back();
  ASSERT_FALSE(units.empty());
  EXPECT_TRUE(std::is_sorted(units.begin(), units.end(), [](auto const& one, auto const& other) {
    return one.nanoseconds > other.nanoseconds;
  }));
  EXPECT_STREQ(units.front().name, "fake::kernel(float*)");
  EXPECT_GE(std::chrono::nanoseconds{units.front().nanoseconds}, 7ms);
  EXPECT_GE(units.front().times, 4U);
  EXPECT_LE(units.front().times, 12U);
  EXPECT_GE(std::chrono::nanoseconds{units.back().nanoseconds}, 500us);
}

/// A kernel that takes as many milliseconds as its parameter says.
void take_so_long(void** parameters) {
  int milliseconds = 0;
  std::memcpy(&milliseconds, parameters[0], sizeof(milliseconds));
  std::this_thread::sleep_for(std::chrono::milliseconds{milliseconds});
}

TEST_F(streams, work_of_one_form_and_several_lengths_is_told_apart_by_what_comes_before_it) {
  CUstream const on = stream();
  std::size_t const one_int = sizeof(int);
  auto* const statistics =
      static_cast<CUfunction>(driver.register_kernel(take_so_long, &one_int, 1, 0));
  CUfunction const small = kernel(10us);
  std::array const layers{std::pair{kernel(20us), 50}, std::pair{kernel(30us), 1},
                          std::pair{kernel(40us), 1}};
  gate.set_run_ahead(std::chrono::nanoseconds{25ms}.count());
  constexpr int rounds = 24;  // on a busy machine some of them are not measured
  for (int round = 0; round < rounds; ++round) {
    for (auto const& [first, milliseconds] : layers) {
      ASSERT_EQ(launch(first, on), CUDA_SUCCESS);
      ASSERT_EQ(launch(small, on), CUDA_SUCCESS);
      ASSERT_EQ(launch(small, on), CUDA_SUCCESS);
      int length = milliseconds;
      std::array<void*, 1> parameters{&length};
      ASSERT_EQ(cuda.launch_kernel(statistics, 1, 1, 1, 1, 1, 1, 0, on, parameters.data(), nullptr),
                CUDA_SUCCESS);
    }
  }
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
  bool found = false;
  std::string seen;
  sluice_gate_long_unit unit{};
  for (std::size_t i = 0; gate.long_unit(i, &unit) != 0; ++i) {
    seen += std::to_string(unit.times) + " of " + std::to_string(unit.nanoseconds) + " ns, ";
    found = found || (std::chrono::nanoseconds{unit.nanoseconds} >= 50ms && unit.times >= 8 &&
                      unit.times <= rounds);
  }
  EXPECT_TRUE(found) << seen;
}

TEST_F(streams, the_unit_that_was_executing_at_the_end_is_told_apart) {
  CUstream const on = stream();
  CUfunction const slow = kernel(30ms);
  gate.set_run_ahead(std::chrono::nanoseconds{200ms}.count());
  bool is_told_apart = false;
  for (int turn = 0; turn < 20 && !is_told_apart; ++turn) {
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
    }
    // Three kernels with events around each: the one before the first has happened.
    ASSERT_TRUE(eventually([this] { return driver.outstanding() <= 8; }));
    ASSERT_EQ(gate.close(in(1s)), 0);
    auto const closed = in(0ns);
    ASSERT_EQ(gate.wait_idle(in(10s)), 0);
    auto const idle = in(0ns);
    // Two more kernels came after it, if this thread closed the gate while the first was executing.
    is_told_apart = gate.unit_ended() >= closed &&
                    gate.unit_ended() <= idle - std::chrono::nanoseconds{50ms}.count();
    gate.open();
  }
  EXPECT_TRUE(is_told_apart);
}

TEST_F(streams, nothing_long_begins_before_a_claim_that_is_announced) {
  CUstream const on = stream();
  CUfunction const longer = kernel(5ms, &count_finished);
  CUfunction const shorter = kernel(50us);
  gate.set_run_ahead(std::chrono::nanoseconds{500us}.count());
  for (int i = 0; i < 8; ++i) {  // until both have been measured
    ASSERT_EQ(launch(longer, on), CUDA_SUCCESS);
    ASSERT_EQ(launch(shorter, on), CUDA_SUCCESS);
  }
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
  std::uint64_t word = static_cast<std::uint64_t>(in(1h));
  gate.set_announcement_word(&word);
  ASSERT_EQ(launch(longer, on), CUDA_SUCCESS) << "it has ended long before";
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);

  __atomic_store_n(&word, static_cast<std::uint64_t>(in(1ms)), __ATOMIC_RELEASE);
  ASSERT_EQ(launch(shorter, on), CUDA_SUCCESS);
  ASSERT_EQ(launch(longer, on), CUDA_SUCCESS);
  EXPECT_GT(in(0ns), static_cast<std::int64_t>(word)) << "it waits until the claim does not come";
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
}

TEST_F(streams, a_thread_waiting_for_room_counts_as_outside) {
  CUstream const on = stream();
  may_end = false;
  CUfunction const endless = kernel(0ns, [](void**) { may_end.wait(false); });
  gate.set_run_ahead(hardly_any);
  std::uint64_t const asked = driver.calls("cuEventQuery");
  auto const launcher = thread([&] {
    for (int i = 0; i < more_than_fit; ++i) {
      EXPECT_EQ(launch(endless, on), CUDA_SUCCESS);
    }
  });
  EXPECT_TRUE(eventually([&] { return driver.calls("cuEventQuery") > asked + 100; }));
  EXPECT_EQ(gate.close(in(patience)), 0) << "room there is when work ends, which it does not";
  may_end = true;
  may_end.notify_all();
  gate.open();
}

TEST_F(streams, an_abort_ends_the_wait_for_room) {
  CUstream const on = stream();
  CUfunction const slow = kernel(100ms);
  gate.set_run_ahead(hardly_any);
  std::uint64_t const asked = driver.calls("cuEventQuery");
  std::atomic<int> result{-1};
  auto const launcher = thread([&] {
    gate.expendable_thread(1);
    CUresult last = CUDA_SUCCESS;
    for (int i = 0; i < more_than_fit; ++i) {
      last = launch(slow, on);
    }
    result = last;
  });
  ASSERT_TRUE(eventually([&] { return driver.calls("cuEventQuery") > asked + 100; }));
  gate.abort_begin();
  ASSERT_TRUE(eventually([&] { return result != -1; }));
  EXPECT_EQ(result, CUDA_SUCCESS);
}

TEST_F(streams, a_thread_whose_stream_waits_for_a_later_launch_of_its_own_goes_on) {
  CUstream const waiting = stream();
  CUstream const writing = stream();
  CUdeviceptr word = 0;
  ASSERT_EQ(cuda.allocate(&word, 4096), CUDA_SUCCESS);
  *reinterpret_cast<std::uint32_t*>(word) = 0;
  using value_function = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  auto const wait_value = gate_library().get<value_function>("cuStreamWaitValue32_v2");
  auto const write_value = gate_library().get<value_function>("cuStreamWriteValue32_v2");
  gate.set_run_ahead(hardly_any);
  ASSERT_EQ(wait_value(waiting, word, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  for (int i = 0; i < more_than_fit; ++i) {  // would wait for ever for the events before them
    ASSERT_EQ(launch(kernel(0ns), waiting), CUDA_SUCCESS);
  }
  ASSERT_EQ(write_value(writing, word, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(waiting), CUDA_SUCCESS);
}

TEST_F(streams, idle_means_that_every_stream_has_done_its_work) {
  CUfunction const slow = kernel(20ms, &count_finished);
  std::vector<CUstream> const several{nullptr, stream(), stream(), CU_STREAM_PER_THREAD};
  for (CUstream on : several) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  std::latch launched{1};
  std::latch looked{1};
  auto const other = thread([&] {
    EXPECT_EQ(cuda.launch_kernel_per_thread(slow, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr),
              CUDA_SUCCESS);
    launched.count_down();
    looked.wait();
  });
  launched.wait();
  ASSERT_EQ(gate.close(in(1s)), 0);
  std::latch done{1};
  auto const control =
      std::jthread{[&] {  // has no context current, as the runtime's control thread may have none
        gate.exempt_thread(1);
        EXPECT_EQ(gate.wait_idle(in(10s)), 0);
        EXPECT_EQ(finished, 5);
        done.count_down();
      }};
  done.wait();
  looked.count_down();
}

TEST_F(streams, waiting_until_idle_gives_up_at_its_deadline_and_can_be_repeated) {
  CUfunction const slow = kernel(2s, &count_finished);
  ASSERT_EQ(launch(slow, stream()), CUDA_SUCCESS);
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.wait_idle(in(5ms)), ETIMEDOUT);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(finished, 1);
}

TEST_F(streams, work_on_a_destroyed_stream_is_waited_for) {
  CUstream const on = stream();
  ASSERT_EQ(launch(kernel(50ms, &count_finished), on), CUDA_SUCCESS);
  ASSERT_EQ(cuda.destroy_stream(on), CUDA_SUCCESS);
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(finished, 1);
}

TEST_F(streams, work_of_an_ended_thread_on_its_default_stream_is_waited_for) {
  auto other = thread([&] {
    EXPECT_EQ(launch(kernel(50ms, &count_finished), CU_STREAM_PER_THREAD), CUDA_SUCCESS);
  });
  other.join();
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(finished, 1);
}

TEST_F(streams, many_short_lived_streams_are_forgotten) {
  for (int i = 0; i < 200; ++i) {
    CUstream const on = stream();
    ASSERT_EQ(launch(kernel(0ns, &count_finished), on), CUDA_SUCCESS);
    ASSERT_EQ(cuda.destroy_stream(on), CUDA_SUCCESS);
  }
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(finished, 200);
}

TEST_F(streams, idle_streams_are_not_asked_again) {
  ASSERT_EQ(launch(kernel(0ns), stream()), CUDA_SUCCESS);
  ASSERT_EQ(gate.close(in(1s)), 0);
  ASSERT_EQ(gate.wait_idle(in(10s)), 0);
  std::uint64_t const recorded = driver.calls("cuEventRecord");
  ASSERT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(driver.calls("cuEventRecord"), recorded);
}

TEST_F(streams, a_capture_is_left_alone_by_bound_close_and_idle) {
  CUstream const captured = stream();
  CUstream const running = stream();
  CUfunction const counted = kernel(0ns, &count_finished);
  std::uint64_t const broken = driver.broken_captures();
  gate.set_run_ahead(hardly_any);
  ASSERT_EQ(cuda.begin_capture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(launch(counted, captured), CUDA_SUCCESS);
  }
  auto other = thread([&] {
    for (int i = 0; i < 50; ++i) {
      EXPECT_EQ(launch(counted, running), CUDA_SUCCESS);
    }
  });
  other.join();
  ASSERT_EQ(gate.close(in(1s)), 0);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(finished, 50);
  gate.open();
  CUgraph graph = nullptr;
  ASSERT_EQ(cuda.end_capture(captured, &graph), CUDA_SUCCESS);
  EXPECT_EQ(driver.broken_captures(), broken);
  CUgraphExec executable = nullptr;
  ASSERT_EQ(cuda.instantiate(&executable, graph, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuda.launch_graph(executable, captured), CUDA_SUCCESS);
  ASSERT_EQ(cuda.synchronise(captured), CUDA_SUCCESS);
  EXPECT_EQ(finished, 60);
  EXPECT_EQ(gate_library().get<decltype(&cuGraphExecDestroy)>("cuGraphExecDestroy")(executable),
            CUDA_SUCCESS);
  EXPECT_EQ(gate_library().get<decltype(&cuGraphDestroy)>("cuGraphDestroy")(graph), CUDA_SUCCESS);
}

TEST_F(streams, when_events_cannot_be_had_launches_go_on_without_a_bound) {
  CUstream const on = stream();
  gate.set_run_ahead(hardly_any);
  driver.fail("cuEventRecord", CUDA_ERROR_INVALID_HANDLE, 0);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(launch(kernel(0ns, &count_finished), on), CUDA_SUCCESS);
  }
  driver.fail("cuEventRecord", 0, 0);
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);
  EXPECT_EQ(finished, 20);
}

}  // namespace
}  // namespace sluice::gate
