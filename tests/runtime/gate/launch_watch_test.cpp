/// The watch over a process's launches: what it tells is exact. It lasts as long as the process, so it is started once.
/// SLUICE_TEST_BURSTS sets how many bursts the threads make (2000).
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "tests/from_environment.hpp"
#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// What the gate has told, and how many kernels have been done.
struct heard {
  std::atomic<int> begun{0}, drained{0}, waited_for{0}, wrong{0};
  std::atomic<bool> works{false};
  std::atomic<std::uint64_t> done{0};
};

/// Whether the device has a kernel to do: none that is counted comes straight from a test.
bool is_busy(heard const& all) {
  static fake_calls_table const driver;
  return driver.calls("cuLaunchKernel") != all.done;
}

void begins(void* of) {
  auto& all = *static_cast<heard*>(of);
  all.wrong += all.works.exchange(true) ? 1 : 0;
  all.wrong += is_busy(all) ? 1 : 0;
  ++all.begun;
}

void drained(void* of, int waited) {
  auto& all = *static_cast<heard*>(of);
  all.wrong += all.works.exchange(false) ? 0 : 1;
  all.wrong += is_busy(all) ? 1 : 0;
  all.waited_for += waited;
  ++all.drained;
}

class watching : public gate_test {
 protected:
  watching() {
    static int const started = [this] {
      static sluice_launch_watcher const watcher{sizeof(sluice_launch_watcher), &heard_, &begins,
                                                 &drained};
      return gate.watch_launches(&watcher);
    }();
    EXPECT_EQ(started, 0);
    EXPECT_TRUE(eventually([] { return !heard_.works; }));
    heard_.begun = heard_.drained = heard_.waited_for = heard_.wrong = 0;
  }
  watching(watching const&) = delete;
  watching& operator=(watching const&) = delete;
  ~watching() override { EXPECT_EQ(heard_.wrong, 0); }

  static inline heard heard_;
  static void is_done(void** /*parameters*/) { ++heard_.done; }
  /// While it is 0 `kept_busy` runs on the device.
  static inline std::atomic<int> goes_on{0};
  static void kept_busy(void** parameters) {
    goes_on.wait(0);
    is_done(parameters);
  }
};

TEST_F(watching, a_burst_begins_once_and_ends_with_the_wait_for_it) {
  CUfunction const short_one = kernel(1us, &is_done);
  CUstream const first = stream();
  CUstream const second = stream();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(launch(short_one, i % 2 == 0 ? first : second), CUDA_SUCCESS);
    EXPECT_GE(heard_.begun, 1);
  }
  EXPECT_EQ(cuda.synchronise(second), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(first), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return heard_.begun == heard_.drained; }));
}

TEST_F(watching, it_has_not_ended_while_another_stream_works) {
  goes_on = 0;
  CUfunction const long_one = kernel(0ns, &kept_busy);
  CUstream const busy = stream();
  CUstream const idle = stream();
  EXPECT_EQ(launch(long_one, busy), CUDA_SUCCESS);
  EXPECT_EQ(launch(kernel(0ns, &is_done), idle), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(idle), CUDA_SUCCESS);
  EXPECT_EQ(heard_.drained, 0);
  goes_on = 1;
  goes_on.notify_all();
  EXPECT_EQ(cuda.synchronise(busy), CUDA_SUCCESS);
  EXPECT_EQ(heard_.begun, 1);
  EXPECT_TRUE(eventually([] { return heard_.drained == 1; }));
}

TEST_F(watching, it_ends_without_anybody_who_waits) {
  EXPECT_EQ(launch(kernel(1us, &is_done), stream()), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return heard_.drained == 1; }));
  EXPECT_EQ(heard_.waited_for, 0);
}

TEST_F(watching, what_waits_for_the_device_ends_it_at_once) {
  // The thread that looks now and then may come first, but not each time.
  CUstream const used = stream();
  CUevent event = nullptr;
  EXPECT_EQ(cuda.create_event(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  unsigned word = 0;
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuda.allocate(&memory, sizeof word), CUDA_SUCCESS);
  std::array<std::function<void()>, 4> const waits{
      [&] { EXPECT_EQ(cuda.synchronise(used), CUDA_SUCCESS); },
      [&] { EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS); },
      [&] {
        EXPECT_EQ(cuda.record(event, used), CUDA_SUCCESS);
        EXPECT_EQ(cuda.synchronise_event(event), CUDA_SUCCESS);
      },
      [&] { EXPECT_EQ(cuda.copy_out(&word, memory, sizeof word), CUDA_SUCCESS); }};
  for (auto const& wait : waits) {
    heard_.waited_for = 0;
    EXPECT_TRUE(eventually([&] {
      EXPECT_EQ(launch(kernel(0ns, &is_done), used), CUDA_SUCCESS);
      wait();
      return heard_.waited_for > 0;
    })) << &wait - waits.data();
  }
  EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_event(event), CUDA_SUCCESS);
}

TEST_F(watching, a_capture_is_no_work_and_its_graph_is) {
  CUstream const used = stream();
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuda.allocate(&memory, sizeof(unsigned)), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  CUgraphExec instance = nullptr;
  EXPECT_EQ(cuda.begin_capture(used, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(cuda.fill(memory, 0, 1, used), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return heard_.begun == heard_.drained; }));
  EXPECT_EQ(cuda.end_capture(used, &graph), CUDA_SUCCESS);
  EXPECT_EQ(driver.broken_captures(), 0U);
  EXPECT_EQ(cuda.instantiate(&instance, graph, 0), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([] { return heard_.begun == heard_.drained; }));
  int const before = heard_.begun;
  EXPECT_EQ(cuda.launch_graph(instance, used), CUDA_SUCCESS);
  EXPECT_EQ(heard_.begun, before + 1);
  EXPECT_EQ(cuda.synchronise(used), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_exec(instance), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_graph(graph), CUDA_SUCCESS);
  EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS);
}

TEST_F(watching, a_second_watcher_is_refused) {
  sluice_launch_watcher const another{sizeof(sluice_launch_watcher), nullptr, &begins, &drained};
  EXPECT_NE(gate.watch_launches(&another), 0);
}

TEST_F(watching, a_closed_gate_holds_launches_as_without_a_watch) {
  ASSERT_EQ(gate.close(in(1s)), 0);
  std::atomic<bool> launched{false};
  auto const held = thread([&] {
    EXPECT_EQ(launch(kernel(0ns, &is_done)), CUDA_SUCCESS);
    launched = true;
  });
  let_others_run();
  EXPECT_FALSE(launched);
  EXPECT_EQ(heard_.begun, 0);
  gate.open();
  EXPECT_TRUE(eventually([&] { return launched.load(); }));
  EXPECT_EQ(heard_.begun, 1);
}

TEST_F(watching, no_launch_of_many_threads_slips_through_between_two_bursts) {
  auto const bursts = static_cast<int>(from_environment("SLUICE_TEST_BURSTS", 2000));
  CUfunction const quick = kernel(0ns, &is_done);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.push_back(thread([&, i] {
        CUstream const used = stream();
        while (heard_.drained < bursts) {
          for (int launches = 0; launches <= i; ++launches) {
            EXPECT_EQ(launch(quick, used), CUDA_SUCCESS);
          }
          EXPECT_EQ(cuda.synchronise(used), CUDA_SUCCESS);
          std::this_thread::yield();
        }
        EXPECT_EQ(cuda.destroy_stream(used), CUDA_SUCCESS);
      }));
    }
  }
  EXPECT_TRUE(eventually([] { return heard_.begun == heard_.drained; }));
}

}  // namespace
}  // namespace sluice::gate
