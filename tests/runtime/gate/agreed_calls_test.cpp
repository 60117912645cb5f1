/// Calls that others have to agree to: they wait their turn, and hold no more than what comes behind
/// them.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <thread>

#include "tests/runtime/gate/agreed_call_fixture.hpp"

namespace sluice::gate {
namespace {

TEST_F(agreed_call, it_is_made_when_all_have_agreed) {
  leave_and_ask(asked, 1, comm);
  EXPECT_EQ(asked.made, 0);
  EXPECT_EQ(cuda.query_stream(comm), CUDA_ERROR_NOT_READY);
  asked.agreed = true;
  EXPECT_EQ(cuda.synchronise(comm), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(1, 2));
  EXPECT_EQ(asked.asked, 1);
  EXPECT_EQ(asked.made, 1);
}

TEST_F(agreed_call, other_streams_go_on_meanwhile_and_can_be_waited_for) {
  leave_and_ask(asked, 100, comm);
  for (int i = 0; i < 50; ++i) {
    note(i);
    note(i, other);
  }
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(other), CUDA_SUCCESS);
  CUevent const recorded = event();
  record(recorded, other);
  EXPECT_EQ(cuda.synchronise_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(cuda.query_event(recorded), CUDA_SUCCESS);
  EXPECT_EQ(take_entries().size(), 100U);
  EXPECT_EQ(asked.made, 0);
  asked.agreed = true;
  EXPECT_EQ(all_entries(), numbers(100, 101));
}

TEST_F(agreed_call, what_comes_behind_it_on_its_stream_or_waits_for_its_event_waits) {
  CUevent const ended = event();
  leave_and_ask(asked, 1, comm);
  note(2, comm);
  record(ended, comm);
  wait_for(ended, nullptr);
  note(3);
  note(10, other);
  EXPECT_EQ(cuda.synchronise(other), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(10, 11));
  EXPECT_EQ(cuda.query_event(ended), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuda.query_stream(nullptr), CUDA_ERROR_NOT_READY);
  asked.agreed = true;
  EXPECT_EQ(all_entries(), numbers(1, 4));
}

TEST_F(agreed_call, an_event_that_a_held_call_waits_for_is_not_recorded_anew) {
  CUevent const ready = event();
  record(ready, other);
  leave_and_ask(asked, 1, comm);
  wait_for(ready, comm);
  std::uint64_t const before = begun();
  record(ready, other);
  note(5, other);  // behind a record that waits
  note(10);
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(begun(), before + 1);
  EXPECT_EQ(take_entries(), numbers(10, 11));
  EXPECT_EQ(cuda.query_event(ready), CUDA_ERROR_NOT_READY);
  asked.agreed = true;
  EXPECT_EQ(all_entries().size(), 2U);
}

TEST_F(agreed_call, nobody_waits_to_destroy_an_event_that_it_holds) {
  CUevent const of_it = event();
  leave_and_ask(asked, 1, comm);
  record(of_it, comm);
  wait_for(of_it, other);
  note(2, other);
  EXPECT_EQ(cuda.destroy_event(of_it), CUDA_SUCCESS);
  note(3);
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);  // which is not held by that either
  EXPECT_EQ(take_entries(), numbers(3, 4));
  asked.agreed = true;
  EXPECT_EQ(all_entries(), numbers(1, 3));
}

TEST_F(agreed_call, the_legacy_stream_waits_for_a_stream_that_it_is_ordered_with) {
  CUstream const ordered = blocking();
  leave_and_ask(asked, 1, ordered);
  note(2);
  note(10, other);
  EXPECT_EQ(cuda.synchronise(other), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(10, 11));
  asked.agreed = true;
  EXPECT_EQ(cuda.synchronise(ordered), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(take_entries().size(), 2U);
}

TEST_F(agreed_call, the_next_one_waits_for_it_whatever_its_stream) {
  leave_and_ask(asked, 1, comm);
  leave(second, 2, other);
  second.agreed = true;
  note(10);
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(second.asked, 0);
  EXPECT_EQ(take_entries(), numbers(10, 11));
  asked.agreed = true;
  EXPECT_EQ(cuda.synchronise(other), CUDA_SUCCESS);
  EXPECT_EQ(second.made, 1);
  EXPECT_EQ(all_entries().size(), 2U);
}

TEST_F(agreed_call, whoever_closes_the_gate_has_it_withdrawn) {
  leave_and_ask(asked, 1, comm);
  close();
  EXPECT_EQ(asked.withdrawn, 1);
  asked.agreed = true;
  note(10);
  std::uint64_t const before = begun();
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(begun(), before);
  EXPECT_EQ(asked.made, 0);
  gate.open();
  EXPECT_EQ(all_entries().size(), 2U);
  EXPECT_EQ(asked.asked, 2);
}

TEST_F(agreed_call, what_was_agreed_on_just_before_is_made_before_the_gate_is_closed) {
  asked.owed = true;
  leave_and_ask(asked, 1, comm);
  note(2, comm);
  close();
  EXPECT_EQ(asked.made, 1);
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(take_entries(), numbers(1, 2));
  gate.open();
  EXPECT_EQ(all_entries(), numbers(2, 3));
}

TEST_F(agreed_call, a_compute_pause_withdraws_it_as_well) {
  static std::uint64_t until = 0;
  leave_and_ask(asked, 1, comm);
  until = static_cast<std::uint64_t>(in(1h));
  gate.set_pause_word(&until);
  EXPECT_TRUE(eventually([&] { return asked.withdrawn == 1; }));
  gate.set_pause_word(nullptr);
  EXPECT_TRUE(eventually([&] { return asked.asked == 2; }));
  asked.agreed = true;
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

TEST_F(agreed_call, of_an_aborted_micro_batch_what_goes_on_beside_it_is_dropped) {
  leave_and_ask(asked, 1, comm);
  gate.expendable_thread(1);
  close();
  note(10);  // left behind a closed gate
  gate.abort_begin();
  gate.open();
  note(11);
  gate.expendable_thread(0);
  note(12);
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  gate.abort_end();
  EXPECT_EQ(take_entries(), numbers(12, 13));
  asked.agreed = true;
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

TEST_F(agreed_call, flushing_waits_for_it) {
  leave_and_ask(asked, 1, comm);
  note(2);
  std::atomic<bool> flushed = false;
  std::thread flusher{[&] {
    gate.flush();
    flushed = true;
  }};
  EXPECT_EQ(cuda.synchronise(nullptr), CUDA_SUCCESS);
  EXPECT_FALSE(flushed);
  asked.agreed = true;
  flusher.join();
  EXPECT_EQ(asked.made, 1);
  EXPECT_EQ(all_entries().size(), 2U);
}

TEST_F(agreed_call, a_queue_that_fills_up_meanwhile_holds_the_thread_that_fills_it) {
  leave_and_ask(asked, 1, comm);
  constexpr int many = 5000;
  std::thread filler{[&] {
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
    for (int i = 0; i < many; ++i) {
      note(i, other);
    }
  }};
  EXPECT_TRUE(eventually_written(1000));
  asked.agreed = true;
  filler.join();
  EXPECT_EQ(all_entries().size(), static_cast<std::size_t>(many) + 1);
}

TEST_F(agreed_call, a_commit_that_is_left_behind_it_is_decided_when_it_has_been_made) {
  static std::atomic<bool> decided;
  decided = false;
  leave_and_ask(asked, 1, comm);
  ASSERT_EQ(gate.commit_begin(
                [](void*) {
                  decided = true;
                  return 1;
                },
                nullptr),
            1);
  note(2);
  gate.commit_end([](void*) {}, nullptr);
  EXPECT_EQ(gate.commit_resolve(in(1ms)), -1);
  EXPECT_FALSE(decided);
  asked.agreed = true;
  EXPECT_EQ(gate.commit_resolve(in(10s)), 1);
  EXPECT_EQ(gate.commit_made(in(10s)), 1);
  EXPECT_EQ(all_entries().size(), 2U);
}

TEST_F(agreed_call, in_a_micro_batch_it_is_refused) {
  gate.expendable_thread(1);
  sluice_agreed_call const call = asked.call(comm);
  EXPECT_EQ(gate.make_agreed(&call), SLUICE_AGREED_REFUSED);
  gate.expendable_thread(0);
  EXPECT_EQ(asked.asked, 0);
}

TEST_F(agreed_call, of_a_micro_batch_that_is_discarded_it_is_dropped_and_what_comes_after_is_made) {
  gate.expendable_thread(1);
  sluice_agreed_call call = asked.call(comm);
  call.drop = [](void* of) { ++question::self(of).dropped; };
  EXPECT_EQ(gate.make_agreed(&call), SLUICE_AGREED_LEFT);
  gate.abort_begin();
  gate.expendable_thread(0);
  gate.abort_end();
  note(1, comm);
  EXPECT_EQ(all_entries(), numbers(1, 2));
  EXPECT_EQ(asked.dropped, 1);
  EXPECT_EQ(asked.made, 0);
  EXPECT_EQ(asked.withdrawn, asked.asked > 0 ? 1 : 0);
}

TEST_F(agreed_call, that_others_have_dropped_is_not_made) {
  sluice_agreed_call call = asked.call(comm);
  call.is_agreed = [](void*) { return 2; };
  call.drop = [](void* of) { ++question::self(of).dropped; };
  EXPECT_EQ(gate.make_agreed_now(&call), SLUICE_AGREED_DROPPED);
  EXPECT_EQ(asked.dropped, 1);
  EXPECT_EQ(asked.made, 0);
}

TEST_F(agreed_call, that_needs_nobody_is_made_inside_the_gate_which_is_not_closed_meanwhile) {
  gate.set_run_ahead(0);
  ASSERT_EQ(gate.enter_at_once(), 1);
  EXPECT_EQ(gate.enter_at_once(), 0);  // it belongs to what the thread is inside for
  auto const close_by_another = [this](std::chrono::nanoseconds patience) {
    return std::async(std::launch::async, [&] { return gate.close(in(patience)); }).get();
  };
  EXPECT_EQ(close_by_another(2ms), ETIMEDOUT);
  note(1, comm);
  gate.leave();
  EXPECT_EQ(close_by_another(10s), 0);
  gate.open();
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

TEST_F(agreed_call, that_needs_nobody_waits_its_turn_where_there_is_a_reason_to) {
  EXPECT_EQ(gate.enter_at_once(), 0);  // it may have to be left to the submitter
  gate.set_run_ahead(0);
  gate.expendable_thread(1);
  EXPECT_EQ(gate.enter_at_once(), 0);
  gate.expendable_thread(0);
  gate.exempt_thread(1);
  EXPECT_EQ(gate.enter_at_once(), 0);
  gate.exempt_thread(0);
  EXPECT_EQ(cuda.begin_capture(comm, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  EXPECT_EQ(gate.enter_at_once(), 0);  // it may be captured
  CUgraph captured = nullptr;
  EXPECT_EQ(cuda.end_capture(comm, &captured), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_graph(captured), CUDA_SUCCESS);
  static std::uint64_t pause_until = 0;
  gate.set_pause_word(&pause_until);
  static std::uint64_t demand = 0;
  gate.set_demand_word(&demand);
  EXPECT_EQ(gate.enter_at_once(), 1);
  gate.leave();
  pause_until = static_cast<std::uint64_t>(in(10s));
  EXPECT_EQ(gate.enter_at_once(), 0);
  pause_until = 0;
  demand = std::uint64_t{1} << 32U | 4;
  EXPECT_EQ(gate.enter_at_once(), 0);
  demand = 0;
  ASSERT_EQ(gate.close(in(10s)), 0);
  EXPECT_EQ(std::async(std::launch::async, [&] { return gate.enter_at_once(); }).get(), 0);
  gate.open();
  EXPECT_EQ(gate.enter_at_once(), 1);
  gate.leave();
  gate.set_pause_word(nullptr);
  gate.set_demand_word(nullptr);
  EXPECT_EQ(gate.enter_at_once(), 1);
  gate.leave();
}

TEST_F(agreed_call, micro_batches_are_counted_and_outside_there_is_none) {
  EXPECT_EQ(gate.micro_batch(), 0);
  gate.expendable_thread(1);
  auto const first = gate.micro_batch();
  EXPECT_GT(first, 0);
  gate.expendable_thread(0);
  EXPECT_EQ(gate.micro_batch(), 0);
  gate.expendable_thread(1);
  EXPECT_EQ(gate.micro_batch(), first + 1);
  gate.expendable_thread(0);
}

}  // namespace
}  // namespace sluice::gate
