/// Bounded run-ahead, and waiting until the device is idle.
#include <atomic>
#include <cerrno>
#include <latch>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

std::atomic<int> finished{0};

void count_finished(void** /*parameters*/) {
  finished.fetch_add(1);
}

class streams : public gate_test {
 protected:
  streams() { finished = 0; }
};

TEST_F(streams, the_window_bounds_what_is_outstanding) {
  CUstream const on = stream();
  CUfunction const slow = kernel(200us);
  constexpr unsigned per_group = 4;
  constexpr unsigned groups = 2;
  gate.set_window(per_group, groups);
  static_cast<void>(driver.outstanding_peak());
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  // Launches of the groups outstanding and of the one being filled, and the events between them.
  EXPECT_LE(driver.outstanding_peak(), per_group * (groups + 1) + groups);
  ASSERT_EQ(cuda.synchronise(on), CUDA_SUCCESS);

  gate.set_window(0, 0);
  static_cast<void>(driver.outstanding_peak());
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  }
  EXPECT_GT(driver.outstanding_peak(), 100U);
}

TEST_F(streams, a_thread_waiting_for_its_share_of_the_window_counts_as_outside) {
  CUstream const on = stream();
  CUfunction const slow = kernel(400ms);
  gate.set_window(1, 1);
  std::uint64_t const asked = driver.calls("cuEventQuery");
  auto const launcher = thread([&] {
    EXPECT_EQ(launch(slow, on), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow, on), CUDA_SUCCESS);
  });
  ASSERT_TRUE(eventually([&] { return driver.calls("cuEventQuery") > asked + 3; }));
  auto const start = std::chrono::steady_clock::now();
  EXPECT_EQ(gate.close(in(10s)), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 300ms);
  gate.open();
}

TEST_F(streams, an_abort_ends_the_wait_for_the_window) {
  CUstream const on = stream();
  CUfunction const slow = kernel(100ms);
  gate.set_window(1, 1);
  ASSERT_EQ(launch(slow, on), CUDA_SUCCESS);
  std::uint64_t const asked = driver.calls("cuEventQuery");
  std::atomic<int> result{-1};
  auto const launcher = thread([&] {
    gate.expendable_thread(1);
    result = launch(slow, on);
  });
  ASSERT_TRUE(eventually([&] { return driver.calls("cuEventQuery") > asked; }));
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
  gate.set_window(1, 1);
  ASSERT_EQ(wait_value(waiting, word, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  ASSERT_EQ(launch(kernel(0ns), waiting),
            CUDA_SUCCESS);  // would wait for ever for the event before it
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
  CUfunction const slow = kernel(300ms, &count_finished);
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

TEST_F(streams, a_capture_is_left_alone_by_window_close_and_idle) {
  CUstream const captured = stream();
  CUstream const running = stream();
  CUfunction const counted = kernel(0ns, &count_finished);
  std::uint64_t const broken = driver.broken_captures();
  gate.set_window(1, 1);
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
  gate.set_window(1, 1);
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
