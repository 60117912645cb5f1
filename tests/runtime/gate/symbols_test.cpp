/// The gate stands where the driver stood: same names, same functions behind them, by either way of
/// asking.
#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

enum class kind { deferred, gated, special, ordered, refused, carries, asks, passed, drains };

struct listed_symbol {
  char const* name;
  kind of;
};

constexpr listed_symbol listed[] = {
#define SLUICE_DRIVER_SYMBOL(name, of) {#name, kind::of},
#include "driver_symbols.inc"
};

std::map<std::string, kind> const& all_symbols() {
  static std::map<std::string, kind> const all = [] {
    std::map<std::string, kind> found;
    for (listed_symbol const& one : listed) {
      found.emplace(one.name, one.of);
    }
    return found;
  }();
  return all;
}

/// Any driver function, called with zeros for every parameter it may have.
using any_function = CUresult (*)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                                  std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                                  std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t);

CUresult call_with_zeros(void* function) {
  return reinterpret_cast<any_function>(function)(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

using ask_function = CUresult (*)(char const*, void**, int, cuuint64_t,
                                  CUdriverProcAddressQueryResult*);
using ask_old_function = CUresult (*)(char const*, void**, int, cuuint64_t);

std::string base_of(std::string name) {
  for (std::string_view suffix : {"_ptsz", "_ptds", "_v2", "_v3", "_v4"}) {
    if (name.ends_with(suffix)) {
      name.resize(name.size() - suffix.size());
    }
  }
  return name;
}

/// Special, and in the end nothing but the driver's call.
bool is_the_drivers(std::string_view name) {
  return name.starts_with("cuStreamEndCapture") || name.ends_with("Unload");
}

class symbols : public gate_test {
 protected:
  ask_function ask_gate = gate_library().get<ask_function>("cuGetProcAddress_v2");
  ask_function ask_driver = fake().get<ask_function>("cuGetProcAddress_v2");

  /// What the gate should answer where the driver answers with `function`.
  [[nodiscard]] static void* expected_for(void* function) {
    static std::map<void*, void*> const ours = [] {
      std::map<void*, void*> found;
      for (auto const& [name, of] : all_symbols()) {
        if (of != kind::passed) {
          found[fake().find(name)] = gate_library().find(name);
        }
      }
      return found;
    }();
    auto const found = ours.find(function);
    return found != ours.end() ? found->second : function;
  }
};

TEST_F(symbols, every_driver_symbol_is_exported_and_is_not_the_drivers) {
  ASSERT_GT(all_symbols().size(), 500U);
  for (auto const& [name, of] : all_symbols()) {
    void* ours = gate_library().find(name);
    EXPECT_NE(ours, nullptr) << name;
    EXPECT_NE(ours, fake().find(name)) << name;
  }
}

TEST_F(symbols, every_call_reaches_the_drivers_function_of_the_same_name) {
  constexpr auto injected = CUDA_ERROR_LAUNCH_FAILED;
  int reached = 0;
  for (auto const& [name, of] : all_symbols()) {
    if (of == kind::refused || (of == kind::special && !is_the_drivers(name))) {
      continue;
    }
    // The gate itself asks the driver some of these; the injected failure hits only the call made
    // here.
    driver.fail(name.c_str(), injected, 0);
    std::uint64_t const before = driver.calls(name.c_str());
    CUresult const result = call_with_zeros(gate_library().find(name));
    driver.fail(name.c_str(), 0, 0);
    EXPECT_EQ(result, injected) << name;
    EXPECT_GE(driver.calls(name.c_str()), before + 1) << name;
    ++reached;
  }
  EXPECT_GT(reached, 500);
}

TEST_F(symbols, every_ordered_call_reaches_it_as_well_while_something_may_be_deferred) {
  constexpr auto injected = CUDA_ERROR_LAUNCH_FAILED;
  gate.set_deferred(1);
  gate.set_run_ahead(std::chrono::nanoseconds{std::chrono::milliseconds{1}}.count());
  int reached = 0;
  for (auto const& [name, of] : all_symbols()) {
    if (of == kind::ordered) {
      std::uint64_t const before = driver.calls(name.c_str());
      driver.fail(name.c_str(), injected, 0);
      EXPECT_EQ(call_with_zeros(gate_library().find(name)), injected) << name;
      driver.fail(name.c_str(), 0, 0);
      EXPECT_GE(driver.calls(name.c_str()), before + 1) << name;
      ++reached;
    }
  }
  EXPECT_GE(reached, 18);
  gate.set_run_ahead(0);
  gate.set_deferred(0);
}

TEST_F(symbols, every_gated_call_is_held_by_the_gate) {
  int held = 0;
  gate.expendable_thread(1);
  gate.abort_begin();
  for (auto const& [name, of] : all_symbols()) {
    if (of == kind::gated || of == kind::deferred) {
      std::uint64_t const before = driver.calls(name.c_str());
      CUresult const result = call_with_zeros(gate_library().find(name));
      EXPECT_TRUE(result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_SUCCESS) << name;
      EXPECT_EQ(driver.calls(name.c_str()), before) << name;
      ++held;
    }
  }
  gate.abort_end();
  EXPECT_GT(held, 100);
}

TEST_F(symbols, work_producing_names_are_gated) {
  for (char const* name : {"cuLaunchKernel",
                           "cuLaunchKernel_ptsz",
                           "cuLaunchKernelEx",
                           "cuLaunchKernelEx_ptsz",
                           "cuLaunchCooperativeKernel",
                           "cuGraphLaunch",
                           "cuGraphLaunch_ptsz",
                           "cuMemcpy",
                           "cuMemcpyHtoD_v2",
                           "cuMemcpyDtoHAsync_v2_ptsz",
                           "cuMemcpy2DUnaligned_v2",
                           "cuMemcpy3DPeerAsync",
                           "cuMemcpyAtoA_v2",
                           "cuMemcpyBatchAsync",
                           "cuMemsetD8Async",
                           "cuMemsetD2D32_v2",
                           "cuStreamWriteValue64_v2",
                           "cuStreamBatchMemOp",
                           "cuStreamAddCallback",
                           "cuLaunchHostFunc",
                           "cuMemPrefetchAsync_v2",
                           "cuStreamBeginCapture_v2"}) {
    ASSERT_TRUE(all_symbols().contains(name)) << name;
    kind const of = all_symbols().at(name);
    EXPECT_TRUE(of == kind::gated || of == kind::deferred) << name;
  }
  for (char const* name :
       {"cuMemImportFromShareableHandle", "cuModuleLoadData", "cuGraphAddDependencies",
        "cuMemAllocManaged", "cuMemAllocHost_v2", "cuCtxGetCurrent"}) {
    EXPECT_EQ(all_symbols().at(name), kind::passed) << name;
  }
}

TEST_F(symbols, what_names_memory_asks) {
  for (char const* name :
       {"cuGraphAddMemcpyNode", "cuGraphAddKernelNode_v2", "cuGraphExecMemsetNodeSetParams",
        "cuGraphExecKernelNodeSetParams_v2", "cuGraphMemcpyNodeSetParams", "cuGraphNodeSetParams",
        "cuTexObjectCreate", "cuTensorMapEncodeTiled", "cuMemGetAccess"}) {
    ASSERT_TRUE(all_symbols().contains(name)) << name;
    EXPECT_EQ(all_symbols().at(name), kind::asks) << name;
  }
}

TEST_F(symbols, what_ends_something_or_waits_never_passes_what_is_queued) {
  for (auto const& [name, of] : all_symbols()) {
    for (std::string_view word :
         {"Destroy", "Free", "Unmap", "Unload", "Reset", "Release", "Synchronize", "Unregister"}) {
      bool const describes = name.find("Node") != std::string::npos || name.starts_with("cuLink") ||
                             name.starts_with("cuLogs");
      bool const ends = name.find(word) != std::string::npos && !describes;
      EXPECT_FALSE(ends && of == kind::passed) << name;
    }
  }
}

TEST_F(symbols, a_launch_on_several_devices_at_once_is_refused) {
  void* function = gate_library().find("cuLaunchCooperativeKernelMultiDevice");
  ASSERT_NE(function, nullptr);
  EXPECT_EQ(call_with_zeros(function), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(driver.calls("cuLaunchCooperativeKernelMultiDevice"), 0U);
}

TEST_F(symbols, proc_address_answers_with_our_function_of_the_variant_that_the_driver_chose) {
  std::set<std::string> bases;
  for (auto const& [name, of] : all_symbols()) {
    bases.insert(base_of(name));
  }
  int replaced = 0;
  for (std::string const& base : bases) {
    for (int version : {11000, 12000, CUDA_VERSION}) {
      for (cuuint64_t flags :
           {CU_GET_PROC_ADDRESS_LEGACY_STREAM, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM}) {
        void* theirs = nullptr;
        void* ours = nullptr;
        CUdriverProcAddressQueryResult status{};
        CUresult const expected = ask_driver(base.c_str(), &theirs, version, flags, nullptr);
        EXPECT_EQ(ask_gate(base.c_str(), &ours, version, flags, &status), expected) << base;
        EXPECT_EQ(ours, expected_for(theirs))
            << base << " version " << version << " flags " << flags;
        EXPECT_EQ(status == CU_GET_PROC_ADDRESS_SUCCESS, ours != nullptr) << base;
        replaced += ours != theirs ? 1 : 0;
      }
    }
  }
  EXPECT_GT(replaced, 300);
}

TEST_F(symbols, the_default_stream_flag_chooses_between_two_functions_of_ours) {
  void* legacy = nullptr;
  void* per_thread = nullptr;
  ASSERT_EQ(
      ask_gate("cuLaunchKernel", &legacy, CUDA_VERSION, CU_GET_PROC_ADDRESS_LEGACY_STREAM, nullptr),
      CUDA_SUCCESS);
  ASSERT_EQ(ask_gate("cuLaunchKernel", &per_thread, CUDA_VERSION,
                     CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, nullptr),
            CUDA_SUCCESS);
  EXPECT_EQ(legacy, gate_library().find("cuLaunchKernel"));
  EXPECT_EQ(per_thread, gate_library().find("cuLaunchKernel_ptsz"));
}

TEST_F(symbols, asking_for_proc_address_itself_stays_with_the_gate) {
  void* found = nullptr;
  ASSERT_EQ(ask_gate("cuGetProcAddress", &found, CUDA_VERSION, 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(found, gate_library().find("cuGetProcAddress_v2"));
  ASSERT_EQ(ask_gate("cuGetProcAddress", &found, 11030, 0, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(found, gate_library().find("cuGetProcAddress"));
  auto const ask_old = reinterpret_cast<ask_old_function>(found);
  ASSERT_EQ(ask_old("cuMemcpyHtoD", &found, CUDA_VERSION, 0), CUDA_SUCCESS);
  EXPECT_EQ(found, gate_library().find("cuMemcpyHtoD_v2"));
}

TEST_F(symbols, an_empty_name_is_answered_as_the_driver_does) {
  void* theirs = &theirs;
  void* ours = &ours;
  CUresult const expected = ask_driver("", &theirs, CUDA_VERSION, 0, nullptr);
  EXPECT_EQ(ask_gate("", &ours, CUDA_VERSION, 0, nullptr), expected);
  EXPECT_EQ(ours, theirs);
}

TEST_F(symbols, an_unknown_launch_of_a_newer_driver_is_reported_as_missing) {
  static int some_function = 0;
  driver.answer("cuLaunchWarp", &some_function);
  driver.answer("cuMemcpyHtoD", &some_function);
  driver.answer("cuDeviceGetMood", &some_function);
  void* found = &found;
  CUdriverProcAddressQueryResult status{};
  EXPECT_EQ(ask_gate("cuLaunchWarp", &found, CUDA_VERSION, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(found, nullptr);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(ask_gate("cuMemcpyHtoD", &found, CUDA_VERSION, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(ask_gate("cuDeviceGetMood", &found, CUDA_VERSION, 0, &status), CUDA_SUCCESS);
  EXPECT_EQ(found, &some_function);
  driver.answer("cuMemcpyHtoD", nullptr);
}

TEST_F(symbols, the_table_names_the_drivers_own_functions) {
  EXPECT_EQ(gate.real("cuMemMap"), fake().find("cuMemMap"));
  EXPECT_EQ(gate.real("cuLaunchKernel"), fake().find("cuLaunchKernel"));
  EXPECT_EQ(gate.real("cuNoSuchThing"), nullptr);
  EXPECT_EQ(gate.size, sizeof(sluice_gate_api));
}

TEST_F(symbols, copies_arrive_through_the_wrappers) {
  std::vector<std::uint32_t> sent(1000);
  for (std::size_t i = 0; i < sent.size(); ++i) {
    sent[i] = static_cast<std::uint32_t>(i * 2654435761U);
  }
  std::size_t const bytes = sent.size() * sizeof(std::uint32_t);
  CUdeviceptr memory = 0;
  ASSERT_EQ(cuda.allocate(&memory, bytes), CUDA_SUCCESS);
  ASSERT_EQ(cuda.copy_in(memory, sent.data(), bytes), CUDA_SUCCESS);
  std::vector<std::uint32_t> received(sent.size());
  ASSERT_EQ(cuda.copy_out(received.data(), memory, bytes), CUDA_SUCCESS);
  EXPECT_EQ(received, sent);
  EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS);
}

}  // namespace
}  // namespace sluice::gate
