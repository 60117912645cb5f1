/// Calls that are left to the submitter: in their order, with their own parameters, and as if they
/// had been made at once.
#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "tests/runtime/gate/submission_fixture.hpp"

namespace sluice::gate {
namespace {

TEST_F(submission, a_thread_goes_on_while_the_gate_is_closed_and_its_launches_follow_in_order) {
  close();
  std::uint64_t const before = begun();
  for (int i = 0; i < 100; ++i) {
    note(i);
  }
  EXPECT_EQ(begun(), before);
  gate.open();
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(0, 100));
  EXPECT_EQ(begun(), before + 100);
}

TEST_F(submission, a_thread_goes_on_while_the_device_is_busy) {
  CUfunction const slow = kernel(500ms);
  std::uint64_t const before = begun();
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
  }
  EXPECT_LT(begun(), before + 8);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(begun(), before + 8);
}

TEST_F(submission, what_is_not_yet_with_the_driver_is_not_ready) {
  CUevent const recorded = event();
  CUevent const before = event();
  CUstream const other = stream();
  EXPECT_EQ(cuda.record(before, nullptr), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return cuda.query_stream(nullptr) == CUDA_SUCCESS; }));
  close();
  note(1);
  EXPECT_EQ(cuda.record(recorded, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuda.query_event(recorded), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuda.query_event(before), CUDA_SUCCESS);
  EXPECT_EQ(cuda.query_stream(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuda.query_stream(other), CUDA_SUCCESS);
  float milliseconds = 0;
  EXPECT_EQ(cuda.elapsed(&milliseconds, before, recorded), CUDA_ERROR_NOT_READY);
  gate.open();
  EXPECT_EQ(cuda.synchronise_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(1, 2));
  EXPECT_EQ(cuda.query_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(cuda.elapsed(&milliseconds, before, recorded), CUDA_SUCCESS);
  EXPECT_TRUE(eventually([&] { return cuda.query_stream(nullptr) == CUDA_SUCCESS; }));
  EXPECT_EQ(cuda.destroy_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_event(before), CUDA_SUCCESS);
}

TEST_F(submission, streams_are_ordered_by_queued_events) {
  CUstream const first = stream();
  CUstream const second = stream();
  CUevent const between = event();
  CUfunction const slow = kernel(5ms);
  EXPECT_EQ(launch(slow, first), CUDA_SUCCESS);
  close();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(launch(slow, first), CUDA_SUCCESS);
    note(2 * i, first);
    EXPECT_EQ(cuda.record(between, first), CUDA_SUCCESS);
    EXPECT_EQ(cuda.wait_event(second, between, 0), CUDA_SUCCESS);
    note(2 * i + 1, second);
    EXPECT_EQ(cuda.record(between, second), CUDA_SUCCESS);
    EXPECT_EQ(cuda.wait_event(first, between, 0), CUDA_SUCCESS);
  }
  gate.open();
  EXPECT_EQ(cuda.synchronise(first), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(0, 20));
  EXPECT_EQ(cuda.destroy_event(between), CUDA_SUCCESS);
}

struct mixed {
  char letter;
  std::uint16_t number;
  double real;
  std::array<char, 5000> many;
};
mixed received{};  // NOLINT: a kernel has no other place to write to

void receive(void** parameters) {
  std::memcpy(&received.letter, parameters[0], sizeof(received.letter));
  std::memcpy(&received.number, parameters[1], sizeof(received.number));
  std::memcpy(&received.real, parameters[2], sizeof(received.real));
  std::memcpy(received.many.data(), parameters[3], received.many.size());
}

class parameters : public submission {
 protected:
  void SetUp() override {
    sent_.many.fill('x');
    received = {};
  }
  std::array<std::size_t, 4> const sizes{1, 2, 8, 5000};
  CUfunction const taking =
      static_cast<CUfunction>(driver.register_kernel(receive, sizes.data(), sizes.size(), 0));
  mixed sent_{'a', 77, 2.5, {}};

  /// Launches once for the driver to accept it, then behind a closed gate; then what was handed over
  /// is overwritten.
  template <typename Launch>
  void overwrite_after(Launch launch_it, void* handed_over, std::size_t bytes) {
    EXPECT_EQ(launch_it(), CUDA_SUCCESS);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    received = {};
    close();
    EXPECT_EQ(launch_it(), CUDA_SUCCESS);
    std::memset(handed_over, 0, bytes);
    gate.open();
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    EXPECT_EQ(received.letter, 'a');
    EXPECT_EQ(received.number, 77);
    EXPECT_EQ(received.real, 2.5);
    EXPECT_EQ(received.many[4999], 'x');
  }
};

TEST_F(parameters, are_copied) {
  std::array<void*, 4> each{&sent_.letter, &sent_.number, &sent_.real, sent_.many.data()};
  overwrite_after(
      [&] {
        return cuda.launch_kernel(taking, 1, 1, 1, 1, 1, 1, 0, nullptr, each.data(), nullptr);
      },
      &sent_, sizeof(sent_));
}

TEST_F(parameters, in_one_buffer_are_copied) {
  std::array<std::byte, 16 + 5000> buffer{};
  std::memcpy(buffer.data(), &sent_.letter, 1);
  std::memcpy(buffer.data() + 2, &sent_.number, 2);
  std::memcpy(buffer.data() + 8, &sent_.real, 8);
  std::memcpy(buffer.data() + 16, sent_.many.data(), 5000);
  std::size_t bytes = buffer.size();
  std::array<void*, 5> extra{CU_LAUNCH_PARAM_BUFFER_POINTER, buffer.data(),
                             CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  overwrite_after(
      [&] {
        return cuda.launch_kernel(taking, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra.data());
      },
      buffer.data(), buffer.size());
}

TEST_F(parameters, of_a_configured_launch_are_copied_with_its_attributes) {
  std::array<void*, 4> each{&sent_.letter, &sent_.number, &sent_.real, sent_.many.data()};
  std::array<CUlaunchAttribute, 2> attributes{};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim = {2, 1, 1};
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  CUlaunchConfig config{2, 1, 1, 32, 1, 1, 0, nullptr, attributes.data(), 2};
  std::uint64_t const straight = driver.calls("cuLaunchKernelEx");
  overwrite_after([&] { return cuda.launch_kernel_ex(&config, taking, each.data(), nullptr); },
                  &sent_, sizeof(sent_));
  EXPECT_EQ(driver.calls("cuLaunchKernelEx"), straight + 2);
}

TEST_F(submission, copies_and_fills_keep_their_place) {
  CUdeviceptr const from = memory(4096);
  CUdeviceptr const to = memory(4096);
  close();
  EXPECT_EQ(cuda.fill(from, 7, 1024, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuda.copy(to, from, 4096, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuda.fill(from, 9, 1024, nullptr), CUDA_SUCCESS);
  gate.open();
  std::array<unsigned, 1024> seen{};
  EXPECT_EQ(cuda.copy_out(seen.data(), to, 4096), CUDA_SUCCESS);  // waits for what was left before
  EXPECT_EQ(seen[1023], 7U);
  EXPECT_EQ(cuda.copy_out(seen.data(), from, 4096), CUDA_SUCCESS);
  EXPECT_EQ(seen[1023], 9U);
  EXPECT_EQ(cuda.free_memory(from), CUDA_SUCCESS);
  EXPECT_EQ(cuda.free_memory(to), CUDA_SUCCESS);
}

TEST_F(submission, copies_from_pinned_memory_are_left_and_others_wait) {
  CUdeviceptr const to = memory(4096);
  void* pinned = nullptr;
  ASSERT_EQ(cuda.allocate_pinned(&pinned, 4096), CUDA_SUCCESS);
  auto* const numbers_there = static_cast<unsigned*>(pinned);
  numbers_there[1023] = 7;
  close();
  EXPECT_EQ(cuda.copy_in_later(to, pinned, 4096, nullptr), CUDA_SUCCESS);
  numbers_there[1023] = 8;  // as with the driver alone, it is read later
  std::array<unsigned, 1024> pageable{};
  pageable[1023] = 9;
  std::atomic<bool> copied{false};
  auto const copying = thread([&] {
    EXPECT_EQ(cuda.copy_in_later(to, pageable.data(), sizeof(pageable), nullptr), CUDA_SUCCESS);
    pageable[1023] = 10;
    copied = true;
  });
  let_others_run();
  EXPECT_FALSE(copied);
  gate.open();
  EXPECT_TRUE(eventually([&] { return copied.load(); }));
  unsigned seen = 0;
  EXPECT_EQ(cuda.copy_out(&seen, to + 1023 * sizeof(unsigned), sizeof(seen)), CUDA_SUCCESS);
  EXPECT_EQ(seen, 9U);
  close();
  EXPECT_EQ(cuda.copy_in_later(to, pinned, 4096, nullptr), CUDA_SUCCESS);
  gate.open();
  EXPECT_EQ(cuda.free_pinned(pinned), CUDA_SUCCESS);  // which waits for what lies before it
  EXPECT_EQ(cuda.copy_out(&seen, to + 1023 * sizeof(unsigned), sizeof(seen)), CUDA_SUCCESS);
  EXPECT_EQ(seen, 8U);
  EXPECT_EQ(cuda.free_memory(to), CUDA_SUCCESS);
}

TEST_F(submission, what_ends_an_object_waits_for_the_calls_that_name_it) {
  CUstream const going = stream();
  close();
  std::atomic<bool> ended{false};
  for (int i = 0; i < 5; ++i) {
    note(i, going);
  }
  auto const ending = thread([&] {
    EXPECT_EQ(cuda.destroy_stream(going), CUDA_SUCCESS);
    ended = true;
  });
  let_others_run();
  EXPECT_FALSE(ended);
  gate.open();
  EXPECT_TRUE(eventually([&] { return ended.load(); }));
  EXPECT_TRUE(eventually_written(5));
  EXPECT_EQ(take_entries(), numbers(0, 5));
}

TEST_F(submission, an_event_ends_behind_the_calls_that_name_it_and_nobody_waits_for_that) {
  CUstream const behind = stream();
  CUevent const recorded = event();
  CUevent const unused = event();
  auto const ended = [this, before = driver.calls("cuEventDestroy_v2")] {
    return driver.calls("cuEventDestroy_v2") - before;
  };
  close();
  note(0);
  EXPECT_EQ(cuda.record(recorded, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuda.wait_event(behind, recorded, 0), CUDA_SUCCESS);
  note(1, behind);
  EXPECT_EQ(cuda.destroy_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(ended(), 0);
  EXPECT_EQ(cuda.destroy_event(unused), CUDA_SUCCESS);
  EXPECT_EQ(ended(), 1);
  gate.open();
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(ended(), 2);
  EXPECT_EQ(take_entries(), numbers(0, 2));
}

TEST_F(submission, a_launch_that_the_driver_refuses_for_its_form_is_refused_at_once) {
  CUfunction const fresh = kernel(0ns);
  auto launch_blocks = [&](unsigned threads) {
    return cuda.launch_kernel(fresh, 1, 1, 1, threads, 1, 1, 0, nullptr, nullptr, nullptr);
  };
  CUfunction const slow = kernel(10ms);
  EXPECT_EQ(launch(slow), CUDA_SUCCESS);
  EXPECT_EQ(launch(slow), CUDA_SUCCESS);
  EXPECT_EQ(launch_blocks(4096), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch_blocks(128), CUDA_SUCCESS);
  EXPECT_EQ(launch_blocks(4096), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
}

TEST_F(submission, another_error_is_told_once_by_a_later_call) {
  close();
  note(1);
  driver.fail("cuLaunchKernel", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 0);
  gate.open();
  EXPECT_EQ(cuda.synchronise_all(), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  driver.fail("cuLaunchKernel", 0, 0);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  note(2);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(2, 3));
}

TEST_F(submission, what_an_aborted_micro_batch_has_left_is_dropped_and_nothing_else) {
  close();
  gate.expendable_thread(1);
  CUevent const recorded = event();
  for (int i = 0; i < 50; ++i) {
    note(i);
  }
  EXPECT_EQ(cuda.record(recorded, nullptr), CUDA_SUCCESS);
  gate.expendable_thread(0);
  note(100);
  gate.abort_begin();
  gate.open();
  EXPECT_EQ(cuda.synchronise_event(recorded), CUDA_SUCCESS) << "events are recorded all the same";
  gate.abort_end();
  gate.expendable_thread(1);
  note(101);
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(100, 102));
  EXPECT_EQ(cuda.destroy_event(recorded), CUDA_SUCCESS);
}

TEST_F(submission, what_was_left_before_an_abort_ended_never_reaches_the_driver_after_it) {
  CUfunction const slow = kernel(2ms);
  EXPECT_EQ(launch(slow), CUDA_SUCCESS);
  gate.expendable_thread(1);
  for (int round = 0; round < 200; ++round) {
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    for (int i = 0; i < 20; ++i) {
      note(i);
    }
    close();
    ASSERT_EQ(gate.wait_idle(in(10s)), 0);
    take_entries();
    gate.abort_begin();
    gate.open();
    gate.abort_end();
    note(1000);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    ASSERT_EQ(take_entries(), std::vector{1000});
  }
}

TEST_F(submission, lifting_the_bound_lets_nothing_overtake) {
  for (int round = 0; round < 100; ++round) {
    close();
    for (int i = 0; i < 20; ++i) {
      note(i);
    }
    gate.set_run_ahead(0);
    auto const rest = thread([&] {
      for (int i = 20; i < 40; ++i) {
        note(i);
      }
    });
    gate.open();
    EXPECT_TRUE(eventually_written(40));
    EXPECT_EQ(take_entries(), numbers(0, 40));
    gate.set_run_ahead(100'000);
  }
}

TEST_F(submission, what_a_function_has_been_told_already_waits_for_nothing) {
  using set_function = CUresult (*)(CUfunction, CUfunction_attribute, int);
  auto const set = gate_library().get<set_function>("cuFuncSetAttribute");
  constexpr auto shared = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  EXPECT_EQ(set(noting, shared, 70'000), CUDA_SUCCESS);
  close();
  note(1);
  EXPECT_EQ(set(noting, shared, 70'000), CUDA_SUCCESS);
  std::atomic<bool> changed{false};
  auto const changing = thread([&] {
    EXPECT_EQ(set(noting, shared, 60'000), CUDA_SUCCESS);
    changed = true;
  });
  let_others_run();
  EXPECT_FALSE(changed);
  gate.open();
  EXPECT_TRUE(eventually([&] { return changed.load(); }));
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(1, 2));
}

TEST_F(submission, what_a_call_has_waited_for_is_counted_under_its_name) {
  auto const waits = [this] {
    sluice_gate_flushes of{};
    for (std::size_t i = 0; gate.flushes(i, &of) != 0; ++i) {
      if (std::strcmp(of.symbol, "cuMemFree_v2") == 0) {
        break;
      }
    }
    return of.times;
  };
  std::uint64_t const before = waits();
  EXPECT_TRUE(eventually([&] {  // the thread may come only when the queue is empty again
    CUdeviceptr memory = 0;
    EXPECT_EQ(cuda.allocate(&memory, 4096), CUDA_SUCCESS);
    close();
    note(1);
    auto freeing = thread([&] { EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS); });
    let_others_run();
    gate.open();
    freeing.join();
    return waits() > before;
  }));
}

TEST_F(submission, a_capture_takes_what_is_launched_in_it_and_nothing_that_was_left_before) {
  CUstream const captured = stream();
  close();
  note(1, captured);
  std::atomic<bool> begun_capture{false};
  CUgraph graph = nullptr;
  auto const capturing = thread([&] {
    EXPECT_EQ(cuda.begin_capture(captured, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    begun_capture = true;
    note(2, captured);
    EXPECT_EQ(cuda.end_capture(captured, &graph), CUDA_SUCCESS);
    CUgraphExec ready = nullptr;
    EXPECT_EQ(cuda.instantiate(&ready, graph, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuda.launch_graph(ready, captured), CUDA_SUCCESS);
    EXPECT_EQ(cuda.launch_graph(ready, captured), CUDA_SUCCESS);
    note(3, captured);
    EXPECT_EQ(cuda.synchronise(captured), CUDA_SUCCESS);
    EXPECT_EQ(cuda.destroy_exec(ready), CUDA_SUCCESS);
    EXPECT_EQ(cuda.destroy_graph(graph), CUDA_SUCCESS);
  });
  let_others_run();
  EXPECT_FALSE(begun_capture);
  gate.open();
  EXPECT_TRUE(eventually_written(4));
  EXPECT_EQ(take_entries(), (std::vector<int>{1, 2, 2, 3}));
}

TEST_F(submission, host_functions_run_after_what_was_launched_before_them) {
  close();
  note(1);
  auto const calling = thread([&] {
    EXPECT_EQ(cuda.call_host(
                  nullptr,
                  [](void*) {
                    std::lock_guard const guard{written().lock};
                    written().entries.push_back(2);
                  },
                  nullptr),
              CUDA_SUCCESS);
    note(3);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  });
  gate.open();
  EXPECT_TRUE(eventually_written(3));
  EXPECT_EQ(take_entries(), numbers(1, 4));
}

TEST_F(submission, a_full_queue_holds_a_thread_until_a_signal_comes) {
  static std::atomic<bool> interrupted{false};
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = true; };
  struct sigaction before {};
  ASSERT_EQ(::sigaction(SIGUSR1, &action, &before), 0);
  close();
  std::atomic<int> launched{0};
  auto launching = thread([&] {
    while (!interrupted) {
      note(launched);
      ++launched;
    }
  });
  int seen = -1;
  EXPECT_TRUE(eventually([&] {  // it has stopped at some number
    int const last = std::exchange(seen, launched.load());
    std::this_thread::sleep_for(1ms);
    return seen > 1000 && seen == last;
  }));
  EXPECT_TRUE(eventually([&] {
    ::pthread_kill(launching.native_handle(), SIGUSR1);
    return launched > seen;
  })) << "the handler's thread must get back to its program";
  launching.join();
  gate.open();
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(0, launched));
  ASSERT_EQ(::sigaction(SIGUSR1, &before, nullptr), 0);
}

TEST_F(submission, another_threads_calls_wait_for_what_was_left_before_it_was_told) {
  CUfunction const slow = kernel(3ms);
  EXPECT_EQ(launch(slow), CUDA_SUCCESS);
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    note(2 * round);
    auto const other = thread([&] { note(2 * round + 1); });
  }
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(0, 40));
}

/// Makes a context, current from now on; nullptr if the driver makes none.
CUcontext another_context() {
  static auto const create =
      gate_library().get<CUresult (*)(CUcontext*, CUctxCreateParams*, unsigned, CUdevice)>(
          "cuCtxCreate_v4");
  CUcontext made = nullptr;
  return create(&made, nullptr, 0, 0) == CUDA_SUCCESS ? made : nullptr;
}

CUresult destroy_context(CUcontext which) {
  static auto const destroy = gate_library().get<CUresult (*)(CUcontext)>("cuCtxDestroy_v2");
  return destroy(which);
}

TEST_F(submission, an_event_that_calls_in_two_contexts_name_ends_behind_both) {
  CUcontext const other = another_context();
  if (other == nullptr) {
    GTEST_SKIP() << "the fake driver makes no contexts";
  }
  CUfunction const slow = kernel(2ms);
  CUstream const there = stream();
  auto const before = driver.calls("cuEventDestroy_v2");
  for (int round = 0; round < 10; ++round) {
    CUevent const named = event();
    EXPECT_EQ(cuda.set_current(other), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow, there), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow, there), CUDA_SUCCESS);
    EXPECT_EQ(cuda.wait_event(there, named, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    EXPECT_EQ(cuda.record(named, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(cuda.destroy_event(named), CUDA_SUCCESS);
  }
  EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
  EXPECT_EQ(driver.calls("cuEventDestroy_v2") - before, 10);
  EXPECT_EQ(destroy_context(other), CUDA_SUCCESS);
  EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
}

TEST_F(submission, a_context_is_destroyed_after_what_was_left_for_it) {
  for (int round = 0; round < 5; ++round) {
    CUcontext const other = another_context();
    if (other == nullptr) {
      GTEST_SKIP() << "the fake driver makes no contexts";
    }
    note(-1);
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    take_entries();
    CUfunction const slow = kernel(2ms);
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    EXPECT_EQ(launch(slow), CUDA_SUCCESS);
    note(5);
    EXPECT_EQ(destroy_context(other), CUDA_SUCCESS);
    EXPECT_TRUE(eventually_written(1));
    EXPECT_EQ(take_entries(), numbers(5, 6));
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
  }
}

}  // namespace
}  // namespace sluice::gate
