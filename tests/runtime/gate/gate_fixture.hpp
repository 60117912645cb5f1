/// What the gate's tests share: the gate over the fake driver, both opened as libraries, and typed
/// ways to call them.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "abi/gate_api.h"
#include "tests/backoff.hpp"
#include "tests/fake_driver/fake_driver.h"
#include "tests/from_environment.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::gate {

class library {
 public:
  explicit library(std::string const& path)
      : handle_{::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)} {
    if (handle_ == nullptr) {
      throw std::runtime_error{::dlerror()};
    }
  }
  library(library const&) = delete;
  library& operator=(library const&) = delete;
  ~library() = default;  // stays open: threads of streams run its code

  [[nodiscard]] void* find(std::string const& symbol) const {
    return ::dlsym(handle_, symbol.c_str());
  }

  template <typename Function>
  [[nodiscard]] Function get(std::string const& symbol) const {
    void* found = find(symbol);
    if (found == nullptr) {
      throw std::runtime_error{"no symbol " + symbol};
    }
    return reinterpret_cast<Function>(found);
  }

 private:
  void* handle_;
};

/// The fake driver, under the gate.
inline library& fake() {
  static library one{fake_driver_path()};
  return one;
}

/// The gate. Opening it does nothing; the first call opens the fake driver.
inline library& gate_library() {
  static library& one = []() -> library& {
    ::setenv("SLUICE_REAL_LIBCUDA", fake_driver_path().c_str(), 1);
    static library opened{gate_path()};
    return opened;
  }();
  return one;
}

/// The driver calls that the tests make, through the gate.
struct driver_calls {
  decltype(&cuInit) init = gate_library().get<decltype(&cuInit)>("cuInit");
  decltype(&cuDevicePrimaryCtxRetain) retain =
      gate_library().get<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxSetCurrent) set_current =
      gate_library().get<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
  decltype(&cuLaunchKernel) launch_kernel =
      gate_library().get<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  decltype(&cuLaunchKernel) launch_kernel_per_thread =
      gate_library().get<decltype(&cuLaunchKernel)>("cuLaunchKernel_ptsz");
  decltype(&cuStreamCreate) create_stream =
      gate_library().get<decltype(&cuStreamCreate)>("cuStreamCreate");
  decltype(&cuStreamDestroy) destroy_stream =
      gate_library().get<decltype(&cuStreamDestroy)>("cuStreamDestroy_v2");
  decltype(&cuStreamSynchronize) synchronise =
      gate_library().get<decltype(&cuStreamSynchronize)>("cuStreamSynchronize");
  decltype(&cuCtxSynchronize) synchronise_all =
      gate_library().get<decltype(&cuCtxSynchronize)>("cuCtxSynchronize");
  decltype(&cuStreamBeginCapture) begin_capture =
      gate_library().get<decltype(&cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  decltype(&cuStreamEndCapture) end_capture =
      gate_library().get<decltype(&cuStreamEndCapture)>("cuStreamEndCapture");
  decltype(&cuGraphInstantiate) instantiate =
      gate_library().get<decltype(&cuGraphInstantiate)>("cuGraphInstantiateWithFlags");
  decltype(&cuGraphLaunch) launch_graph =
      gate_library().get<decltype(&cuGraphLaunch)>("cuGraphLaunch");
  decltype(&cuLaunchKernelEx) launch_kernel_ex =
      gate_library().get<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
  decltype(&cuStreamQuery) query_stream =
      gate_library().get<decltype(&cuStreamQuery)>("cuStreamQuery");
  decltype(&cuStreamWaitEvent) wait_event =
      gate_library().get<decltype(&cuStreamWaitEvent)>("cuStreamWaitEvent");
  decltype(&cuEventCreate) create_event =
      gate_library().get<decltype(&cuEventCreate)>("cuEventCreate");
  decltype(&cuEventDestroy) destroy_event =
      gate_library().get<decltype(&cuEventDestroy)>("cuEventDestroy_v2");
  decltype(&cuEventRecord) record = gate_library().get<decltype(&cuEventRecord)>("cuEventRecord");
  decltype(&cuEventQuery) query_event = gate_library().get<decltype(&cuEventQuery)>("cuEventQuery");
  decltype(&cuEventSynchronize) synchronise_event =
      gate_library().get<decltype(&cuEventSynchronize)>("cuEventSynchronize");
  decltype(&cuEventElapsedTime) elapsed =
      gate_library().get<decltype(&cuEventElapsedTime)>("cuEventElapsedTime_v2");
  decltype(&cuGraphExecDestroy) destroy_exec =
      gate_library().get<decltype(&cuGraphExecDestroy)>("cuGraphExecDestroy");
  decltype(&cuGraphDestroy) destroy_graph =
      gate_library().get<decltype(&cuGraphDestroy)>("cuGraphDestroy");
  decltype(&cuMemsetD32Async) fill =
      gate_library().get<decltype(&cuMemsetD32Async)>("cuMemsetD32Async");
  decltype(&cuMemcpyDtoDAsync) copy =
      gate_library().get<decltype(&cuMemcpyDtoDAsync)>("cuMemcpyDtoDAsync_v2");
  decltype(&cuLaunchHostFunc) call_host =
      gate_library().get<decltype(&cuLaunchHostFunc)>("cuLaunchHostFunc");
  decltype(&cuMemAlloc) allocate = gate_library().get<decltype(&cuMemAlloc)>("cuMemAlloc_v2");
  decltype(&cuMemAllocPitch) allocate_pitch =
      gate_library().get<decltype(&cuMemAllocPitch)>("cuMemAllocPitch_v2");
  decltype(&cuMemFree) free_memory = gate_library().get<decltype(&cuMemFree)>("cuMemFree_v2");
  decltype(&cuMemGetInfo) memory_info =
      gate_library().get<decltype(&cuMemGetInfo)>("cuMemGetInfo_v2");
  decltype(&cuDeviceTotalMem) total_memory =
      gate_library().get<decltype(&cuDeviceTotalMem)>("cuDeviceTotalMem_v2");
  decltype(&cuMemGetAddressRange) address_range =
      gate_library().get<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange_v2");
  decltype(&cuIpcGetMemHandle) ipc_handle =
      gate_library().get<decltype(&cuIpcGetMemHandle)>("cuIpcGetMemHandle");
  decltype(&cuMemRetainAllocationHandle) retain_handle =
      gate_library().get<decltype(&cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(&cuMemGetHandleForAddressRange) range_handle =
      gate_library().get<decltype(&cuMemGetHandleForAddressRange)>("cuMemGetHandleForAddressRange");
  decltype(&cuMulticastBindAddr) bind_to_multicast =
      gate_library().get<decltype(&cuMulticastBindAddr)>("cuMulticastBindAddr");
  decltype(&cuMemMap) map = gate_library().get<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = gate_library().get<decltype(&cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access =
      gate_library().get<decltype(&cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemAddressFree) free_addresses =
      gate_library().get<decltype(&cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemcpyHtoD) copy_in = gate_library().get<decltype(&cuMemcpyHtoD)>("cuMemcpyHtoD_v2");
  decltype(&cuMemcpyHtoDAsync) copy_in_later =
      gate_library().get<decltype(&cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2");
  decltype(&cuMemAllocHost) allocate_pinned =
      gate_library().get<decltype(&cuMemAllocHost)>("cuMemAllocHost_v2");
  decltype(&cuMemFreeHost) free_pinned =
      gate_library().get<decltype(&cuMemFreeHost)>("cuMemFreeHost");
  decltype(&cuMemcpyDtoH) copy_out = gate_library().get<decltype(&cuMemcpyDtoH)>("cuMemcpyDtoH_v2");
};

/// What the tests ask of the fake driver.
struct fake_calls_table {
  decltype(&fake_fail) fail = fake().get<decltype(&fake_fail)>("fake_fail");
  decltype(&fake_delay) delay = fake().get<decltype(&fake_delay)>("fake_delay");
  decltype(&fake_calls) calls = fake().get<decltype(&fake_calls)>("fake_calls");
  decltype(&fake_calls_inside) inside =
      fake().get<decltype(&fake_calls_inside)>("fake_calls_inside");
  decltype(&fake_answer) answer = fake().get<decltype(&fake_answer)>("fake_answer");
  decltype(&fake_register_kernel) register_kernel =
      fake().get<decltype(&fake_register_kernel)>("fake_register_kernel");
  decltype(&fake_outstanding) outstanding =
      fake().get<decltype(&fake_outstanding)>("fake_outstanding");
  decltype(&fake_outstanding_peak) outstanding_peak =
      fake().get<decltype(&fake_outstanding_peak)>("fake_outstanding_peak");
  decltype(&fake_broken_captures) broken_captures =
      fake().get<decltype(&fake_broken_captures)>("fake_broken_captures");
};

[[nodiscard]] inline std::int64_t in(std::chrono::nanoseconds span) {
  return (std::chrono::steady_clock::now().time_since_epoch() + span).count();
}

/// Waits until a condition that another thread brings about holds; false if it does not in the end.
[[nodiscard]] inline bool eventually(std::function<bool()> const& holds) {
  auto const end = std::chrono::steady_clock::now() + patience;
  for (backoff until_it_does; !holds(); until_it_does.wait()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
  }
  return true;
}

/// Long enough for a thread that waits for nothing to have gone on, usually.
inline void let_others_run() {
  for (int i = 0; i < 1000; ++i) {
    std::this_thread::yield();
  }
}

/// An initialised device with its primary context current, and a gate in its first state before and
/// after each test.
class gate_test : public ::testing::Test {
 protected:
  gate_test() {
    reset();
    EXPECT_EQ(cuda.init(0), CUDA_SUCCESS);
    EXPECT_EQ(cuda.retain(&context, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
  }
  gate_test(gate_test const&) = delete;
  gate_test& operator=(gate_test const&) = delete;
  ~gate_test() override {
    reset();
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  }

  void reset() const {
    driver.delay("cuLaunchKernel", 0);
    gate.exempt_thread(0);
    gate.protect_thread(0);
    gate.expendable_thread(0);
    gate.set_pause_word(nullptr);
    gate.set_urgent(0);
    gate.set_demand_word(nullptr);
    gate.set_announcement_word(nullptr);
    gate.set_run_ahead(0);
    gate.set_deferred(0);
    gate.abort_end();
    gate.open();
  }

  /// A kernel without parameters that takes that long.
  [[nodiscard]] CUfunction kernel(std::chrono::nanoseconds duration,
                                  fake_kernel_body body = nullptr) const {
    return static_cast<CUfunction>(driver.register_kernel(body, nullptr, 0, duration.count()));
  }

  [[nodiscard]] CUresult launch(CUfunction function, CUstream stream = nullptr) const {
    return cuda.launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
  }

  /// A thread with the context current.
  template <typename Body>
  [[nodiscard]] std::jthread thread(Body body) const {
    return std::jthread{[this, body = std::move(body)] {
      EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
      body();
    }};
  }

  [[nodiscard]] CUstream stream() const {
    CUstream made = nullptr;
    EXPECT_EQ(cuda.create_stream(&made, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return made;
  }

  driver_calls cuda;
  fake_calls_table driver;
  sluice_gate_api const& gate =
      *gate_library().get<sluice_gate_api const* (*)()>("sluice_gate_table")();
  CUcontext context = nullptr;
};

}  // namespace sluice::gate
