/// Under `sluice run` the gate opens the runtime library once, and memory calls go through it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"
#include "tests/runtime/gate/test_runtime.h"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Set before anything touches the gate.
int const environment = [] {
  ::setenv("SLUICE_RUN", "1", 1);
  ::setenv("SLUICE_RUNTIME_LIBRARY", test_runtime_path().c_str(), 1);
  return 0;
}();

library& runtime() {
  static library one{test_runtime_path()};
  return one;
}

class attach : public gate_test {
 protected:
  attach() { serve(0, 0); }

  [[nodiscard]] static int attached() {
    return runtime().get<decltype(&test_runtime_attached)>("test_runtime_attached")();
  }
  [[nodiscard]] static int live() {
    return runtime().get<decltype(&test_runtime_live)>("test_runtime_live")();
  }
  static void serve(std::size_t largest, std::size_t room) {
    runtime().get<decltype(&test_runtime_serve)>("test_runtime_serve")(largest, room);
  }
  /// Attaches if no test of this process has.
  void make_sure_of_runtime() const { ASSERT_EQ(launch(kernel(0ns)), CUDA_SUCCESS); }
};

TEST_F(attach, happens_once_at_the_first_launch_or_allocation_of_any_thread) {
  // The fixture has initialised the driver and made a context current: neither attaches. This test
  // may run after others in one process, which then have attached.
  int const before = attached();
  EXPECT_LE(before, 1);
  std::latch ready{9};
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.push_back(thread([&, i] {
      ready.arrive_and_wait();
      if (i % 2 == 0) {
        EXPECT_EQ(launch(kernel(0ns)), CUDA_SUCCESS);
      } else {
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        EXPECT_EQ(cuda.memory_info(&free_bytes, &total_bytes), CUDA_SUCCESS);
        EXPECT_EQ(
            total_bytes,
            std::size_t{1} << 40U);  // the pool's answer: nobody overtakes the attaching thread
      }
    }));
  }
  ready.arrive_and_wait();
  threads.clear();
  EXPECT_EQ(attached(), 1);
  EXPECT_EQ(runtime().get<decltype(&test_runtime_device)>("test_runtime_device")(), 0);
  EXPECT_EQ(runtime().get<decltype(&test_runtime_gate)>("test_runtime_gate")(), &gate);
}

TEST_F(attach, waits_for_a_context) {
  if (attached() != 0) {
    GTEST_SKIP() << "another test of this process has attached";
  }
  ASSERT_EQ(cuda.set_current(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(launch(kernel(0ns)), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(attached(), 0);
  ASSERT_EQ(cuda.set_current(context), CUDA_SUCCESS);
  EXPECT_EQ(launch(kernel(0ns)), CUDA_SUCCESS);
  EXPECT_EQ(attached(), 1);
}

TEST_F(attach, who_hears_late_that_others_have_dropped_a_micro_batch_is_told_that_another_runs) {
  make_sure_of_runtime();
  struct hearing {
    sluice_gate_api const& gate;
    std::vector<int> is_running;
  } heard{gate, {}};
  auto const on_drop = runtime().get<decltype(&test_runtime_on_drop)>("test_runtime_on_drop");
  on_drop(
      [](void* of, int (*is_running)(void const* which), void const* which) {
        auto& self = *static_cast<hearing*>(of);
        self.is_running.push_back(is_running(which));
        self.gate
            .abort_begin();  // it is discarded for a reason of its own, and the next one begins
        self.gate.abort_end();
        self.is_running.push_back(is_running(which));
      },
      &heard);
  sluice_agreed_call const call{.stream = nullptr,
                                .of = nullptr,
                                .ask = [](void*) {},
                                .is_agreed = [](void*) { return 2; },
                                .withdraw = [](void*) { return 0; },
                                .make = [](void*) {},
                                .drop = [](void*) {}};
  gate.expendable_thread(1);
  EXPECT_EQ(gate.make_agreed_now(&call), SLUICE_AGREED_DROPPED);
  gate.expendable_thread(0);
  on_drop(nullptr, nullptr);
  EXPECT_EQ(heard.is_running, (std::vector{1, 0}));
}

TEST_F(attach, an_allocation_comes_from_the_pool_or_from_the_driver_as_the_runtime_says) {
  make_sure_of_runtime();
  serve(1000, 1500);
  CUdeviceptr pooled = 0;
  ASSERT_EQ(cuda.allocate(&pooled, 1000), CUDA_SUCCESS);
  EXPECT_GE(pooled, 0x7000'0000'0000U);
  CUdeviceptr refused = 0;
  EXPECT_EQ(cuda.allocate(&refused, 1000), CUDA_ERROR_OUT_OF_MEMORY);
  std::uint64_t const asked = driver.calls("cuMemAlloc_v2");
  CUdeviceptr drivers = 0;
  ASSERT_EQ(cuda.allocate(&drivers, 5000), CUDA_SUCCESS);
  EXPECT_EQ(driver.calls("cuMemAlloc_v2"), asked + 1);

  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  EXPECT_EQ(cuda.address_range(&base, &bytes, pooled + 999), CUDA_SUCCESS);
  EXPECT_EQ(base, pooled);
  EXPECT_EQ(bytes, 1000U);
  EXPECT_EQ(cuda.address_range(&base, nullptr, drivers + 10), CUDA_SUCCESS);
  EXPECT_EQ(base, drivers);

  std::uint64_t const freed = driver.calls("cuMemFree_v2");
  EXPECT_EQ(live(), 1);
  EXPECT_EQ(cuda.free_memory(pooled + 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(driver.calls("cuMemFree_v2"), freed);
  EXPECT_EQ(cuda.free_memory(drivers), CUDA_SUCCESS);
  EXPECT_EQ(driver.calls("cuMemFree_v2"), freed + 1);
  EXPECT_EQ(cuda.free_memory(0), CUDA_SUCCESS);
}

TEST_F(attach, a_pitched_allocation_has_aligned_rows) {
  make_sure_of_runtime();
  serve(1 << 20, 1 << 20);
  CUdeviceptr pooled = 0;
  std::size_t pitch = 0;
  ASSERT_EQ(cuda.allocate_pitch(&pooled, &pitch, 1000, 3, 4), CUDA_SUCCESS);
  EXPECT_EQ(pitch, 1024U);
  std::size_t bytes = 0;
  EXPECT_EQ(cuda.address_range(nullptr, &bytes, pooled), CUDA_SUCCESS);
  EXPECT_EQ(bytes, 3 * 1024U);
  EXPECT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
}

TEST_F(attach, free_and_total_memory_are_the_jobs_share) {
  make_sure_of_runtime();
  serve(1000, 12345);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_EQ(cuda.memory_info(&free_bytes, &total_bytes), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes, 12345U);
  EXPECT_EQ(total_bytes, std::size_t{1} << 40U);
}

TEST_F(attach, freeing_pool_memory_waits_for_the_work_that_may_use_it) {
  make_sure_of_runtime();
  serve(1000, 1000);
  static std::atomic<int> finished{0};
  finished = 0;
  CUdeviceptr pooled = 0;
  ASSERT_EQ(cuda.allocate(&pooled, 1000), CUDA_SUCCESS);
  ASSERT_EQ(launch(kernel(50ms, [](void**) { ++finished; }), stream()), CUDA_SUCCESS);
  ASSERT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
  EXPECT_EQ(finished, 1);
}

TEST_F(attach, pool_memory_has_no_ipc_handle) {
  make_sure_of_runtime();
  serve(1000, 1000);
  CUdeviceptr pooled = 0;
  ASSERT_EQ(cuda.allocate(&pooled, 1000), CUDA_SUCCESS);
  CUipcMemHandle handle{};
  std::uint64_t const asked = driver.calls("cuIpcGetMemHandle");
  EXPECT_EQ(cuda.ipc_handle(&handle, pooled), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(driver.calls("cuIpcGetMemHandle"), asked);
  EXPECT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
}

TEST_F(attach, pool_memory_has_no_handle_by_which_it_could_be_reached_later) {
  make_sure_of_runtime();
  serve(1000, 1000);
  CUdeviceptr pooled = 0;
  ASSERT_EQ(cuda.allocate(&pooled, 1000), CUDA_SUCCESS);
  auto const asked = [&] {
    return driver.calls("cuMemRetainAllocationHandle") + driver.calls("cuMulticastBindAddr") +
           driver.calls("cuMemGetHandleForAddressRange");
  };
  auto const before = asked();
  CUmemGenericAllocationHandle handle = 0;
  auto* const inside = reinterpret_cast<void*>(pooled + 10);
  // As the driver says of memory that is not made by cuMemCreate: libraries know that answer.
  EXPECT_EQ(cuda.retain_handle(&handle, inside), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.bind_to_multicast(handle, 0, pooled, 1000, 0), CUDA_ERROR_INVALID_VALUE);
  int descriptor = -1;
  EXPECT_EQ(cuda.range_handle(&descriptor, pooled, 1000, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
            CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(asked(), before);

  CUdeviceptr drivers = 0;
  ASSERT_EQ(cuda.allocate(&drivers, 5000), CUDA_SUCCESS);
  (void)cuda.retain_handle(&handle, reinterpret_cast<void*>(drivers));
  (void)cuda.bind_to_multicast(handle, 0, drivers, 5000, 0);
  (void)cuda.range_handle(&descriptor, drivers, 5000, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  EXPECT_EQ(asked(), before + 3);
  EXPECT_EQ(cuda.free_memory(drivers), CUDA_SUCCESS);
  EXPECT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
}

TEST_F(attach, mappings_of_pool_memory_are_not_the_programs_to_change) {
  make_sure_of_runtime();
  serve(1000, 1000);
  CUdeviceptr pooled = 0;
  ASSERT_EQ(cuda.allocate(&pooled, 1000), CUDA_SUCCESS);
  auto const asked = [&] {
    return driver.calls("cuMemMap") + driver.calls("cuMemUnmap") + driver.calls("cuMemSetAccess") +
           driver.calls("cuMemAddressFree");
  };
  auto const before = asked();
  CUmemAccessDesc const for_all{{CU_MEM_LOCATION_TYPE_DEVICE, 1},
                                CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT_EQ(cuda.map(pooled, 1000, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.unmap(pooled, 1000), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.set_access(pooled, 1000, &for_all, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.free_addresses(pooled, 1000), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(asked(), before);

  CUdeviceptr const foreign = 0x1000;
  (void)cuda.map(foreign, 1000, 0, 0, 0);
  (void)cuda.unmap(foreign, 1000);
  (void)cuda.set_access(foreign, 1000, &for_all, 1);
  (void)cuda.free_addresses(foreign, 1000);
  EXPECT_EQ(asked(), before + 4);
  EXPECT_EQ(cuda.free_memory(pooled), CUDA_SUCCESS);
}

TEST_F(attach, a_forked_child_is_held_by_nothing_and_takes_no_pool_memory) {
  make_sure_of_runtime();
  serve(1000, 1000);
  ASSERT_EQ(gate.close(in(1s)), 0);
  gate.abort_begin();
  pid_t const child = ::fork();
  if (child == 0) {
    // The driver itself refuses to work here; what matters is that its answer comes, and comes from
    // it.
    CUdeviceptr memory = 0;
    bool const straight = launch(nullptr) == CUDA_ERROR_NOT_INITIALIZED &&
                          cuda.allocate(&memory, 100) == CUDA_ERROR_NOT_INITIALIZED &&
                          gate.close(0) == 0 && gate.wait_idle(0) == 0;
    ::_exit(straight ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace sluice::gate
