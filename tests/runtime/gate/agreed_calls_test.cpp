/// Calls that others have to agree to: they wait their turn, and hold no more than what comes behind
/// them.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/runtime/gate/submission_fixture.hpp"

namespace sluice::gate {
namespace {

/// Something that is asked, and answers as the test says.
struct question {
  std::atomic<bool> agreed{false};
  std::atomic<bool> owed{false};  ///< they agree just before it is withdrawn
  std::atomic<int> asked{0};
  std::atomic<int> withdrawn{0};
  std::atomic<int> made{0};
  std::atomic<int> dropped{0};
  std::function<void()> launch;

  [[nodiscard]] sluice_agreed_call call(CUstream stream) {
    return {.stream = stream,
            .of = this,
            .ask = [](void* of) { ++self(of).asked; },
            .is_agreed = [](void* of) { return self(of).agreed ? 1 : 0; },
            .withdraw =
                [](void* of) {
                  ++self(of).withdrawn;
                  return self(of).owed ? 1 : 0;
                },
            .make =
                [](void* of) {
                  self(of).launch();
                  ++self(of).made;
                },
            .drop = nullptr};
  }
  static question& self(void* of) { return *static_cast<question*>(of); }
};

class agreed_call : public submission {
 protected:
  agreed_call() {
    comm = stream();
    other = stream();
  }
  ~agreed_call() override {
    asked.agreed = second.agreed = true;
    gate.flush();
  }

  /// One that the legacy stream is ordered with.
  [[nodiscard]] CUstream blocking() const {
    CUstream made = nullptr;
    EXPECT_EQ(cuda.create_stream(&made, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    note(-1, made);
    EXPECT_EQ(cuda.synchronise(made), CUDA_SUCCESS);
    take_entries();
    return made;
  }
  /// Leaves a call that notes `number` on the stream when it is made.
  void leave(question& of, int number, CUstream stream) {
    of.launch = [this, number, stream] { note(number, stream); };
    sluice_agreed_call const call = of.call(stream);
    ASSERT_EQ(gate.make_agreed(&call), 0);
  }
  /// And waits until it has been asked for.
  void leave_and_ask(question& of, int number, CUstream stream) {
    leave(of, number, stream);
    ASSERT_TRUE(eventually([&] { return of.asked > 0; }));
  }
  void record(CUevent which, CUstream stream) const {
    EXPECT_EQ(cuda.record(which, stream), CUDA_SUCCESS);
  }
  void wait_for(CUevent which, CUstream stream) const {
    EXPECT_EQ(cuda.wait_event(stream, which, 0), CUDA_SUCCESS);
  }
  /// Whether calls go straight, sooner or later.
  [[nodiscard]] bool eventually_straight() const {
    bool const straight = eventually([this] { return gate.enter_at_once() != 0; });
    if (straight) {
      gate.leave();
    }
    return straight;
  }
  /// What has been written once everything is done.
  [[nodiscard]] std::vector<int> all_entries() const {
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    return take_entries();
  }

  question asked;
  question second;
  CUstream comm = nullptr;
  CUstream other = nullptr;
};

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
  EXPECT_EQ(gate.commit_settle(in(1ms)), -1);
  EXPECT_FALSE(decided);
  asked.agreed = true;
  EXPECT_EQ(gate.commit_settle(in(10s)), 1);
  EXPECT_EQ(gate.commit_made(in(10s)), 1);
  EXPECT_EQ(all_entries().size(), 2U);
}

TEST_F(agreed_call, without_a_bound_the_calling_thread_makes_what_is_agreed_on_at_once) {
  gate.set_run_ahead(0);
  asked.agreed = true;
  asked.launch = [this] { note(1, comm); };
  sluice_agreed_call const call = asked.call(comm);
  EXPECT_EQ(gate.make_agreed(&call), 1);
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

TEST_F(agreed_call, without_a_bound_the_calling_thread_does_not_wait_for_others) {
  gate.set_run_ahead(0);
  leave(asked, 1, comm);
  note(2, comm);
  leave(second, 3, comm);
  note(4, comm);
  note(10, other);
  EXPECT_EQ(cuda.synchronise(other), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(10, 11));
  EXPECT_EQ(cuda.query_stream(comm), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(asked.made, 0);
  second.agreed = true;
  asked.agreed = true;
  EXPECT_EQ(cuda.synchronise(comm), CUDA_SUCCESS);
  EXPECT_EQ(take_entries(), numbers(1, 5));
  EXPECT_EQ(asked.withdrawn, 1);  // by the thread, which left it to the submitter
}

TEST_F(agreed_call, without_a_bound_calls_go_straight_again_when_it_has_been_made) {
  gate.set_run_ahead(0);
  for (int round = 0; round < 20; ++round) {
    question one;
    leave(one, 1, comm);
    note(2, comm);
    one.agreed = true;
    EXPECT_EQ(cuda.synchronise(comm), CUDA_SUCCESS);
    EXPECT_EQ(take_entries(), numbers(1, 3));
    EXPECT_TRUE(eventually_straight());
    auto const left = gate.deferred();
    note(3, comm);
    EXPECT_EQ(gate.deferred(), left);
    EXPECT_EQ(all_entries(), numbers(3, 4));
  }
}

TEST_F(agreed_call, without_a_bound_what_comes_soon_after_it_is_left_as_well) {
  gate.set_run_ahead(0);
  bool was_left = false;
  for (int round = 0; round < 100 && !was_left; ++round) {  // the machine may stand still meanwhile
    question one;
    leave(one, 1, comm);
    one.agreed = true;
    EXPECT_EQ(cuda.synchronise(comm), CUDA_SUCCESS);
    auto const soon = in(500us);
    EXPECT_TRUE(eventually([&] { return in(0us) > soon; }));
    auto const left = gate.deferred();
    note(2, comm);
    was_left = gate.deferred() > left;
    EXPECT_EQ(all_entries(), numbers(1, 3));
  }
  EXPECT_TRUE(was_left);
}

TEST_F(agreed_call, without_a_bound_and_a_submitter_the_calling_thread_waits) {
  gate.set_deferred(0);
  gate.set_run_ahead(0);
  EXPECT_TRUE(eventually_straight());
  auto waits = std::async(std::launch::async, [this] {
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
    asked.launch = [this] { note(1, comm); };
    sluice_agreed_call const call = asked.call(comm);
    return gate.make_agreed(&call);
  });
  EXPECT_TRUE(eventually([this] { return asked.asked > 0; }));
  EXPECT_EQ(waits.wait_for(20ms), std::future_status::timeout);
  asked.agreed = true;
  EXPECT_EQ(waits.get(), SLUICE_AGREED_MADE);
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

/// Others agree sooner or later, and the bound comes and goes.
TEST_F(agreed_call, every_stream_keeps_its_order_while_calls_are_left_and_go_straight_by_turns) {
  constexpr int rounds = 2000;
  std::atomic<question*> open{nullptr};
  std::atomic<bool> over{false};
  std::thread others{[&] {
    for (unsigned turn = 0; !over; ++turn) {
      if (question* const one = open.exchange(nullptr); one != nullptr) {
        for (unsigned spin = turn % 7; spin > 0; --spin) {
          std::this_thread::yield();
        }
        one->agreed = true;
      }
      std::this_thread::yield();
    }
  }};
  std::thread bounds{[&] {
    for (bool bounded = false; !over; bounded = !bounded) {
      gate.set_run_ahead(bounded ? std::chrono::nanoseconds{100us}.count() : 0);
      std::this_thread::yield();
    }
  }};
  std::thread beside{[&] {
    EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
    for (int i = 0; i < rounds; ++i) {
      note(-1 - i, other);
    }
  }};
  std::vector<std::unique_ptr<question>> all;
  for (int i = 0; i < rounds; ++i) {
    auto& one = *all.emplace_back(std::make_unique<question>());
    one.launch = [this, i] { note(2 * i, comm); };
    sluice_agreed_call const call = one.call(comm);
    question* none = nullptr;
    while (!open.compare_exchange_weak(none, &one)) {
      none = nullptr;
      std::this_thread::yield();
    }
    EXPECT_NE(gate.make_agreed(&call), SLUICE_AGREED_REFUSED);
    note(2 * i + 1, comm);
  }
  beside.join();
  gate.flush();
  over = true;
  others.join();
  bounds.join();
  std::vector<int> of_comm;
  std::vector<int> of_other;
  for (int const entry : all_entries()) {
    (entry < 0 ? of_other : of_comm).push_back(entry < 0 ? -1 - entry : entry);
  }
  EXPECT_EQ(of_comm, numbers(0, 2 * rounds));
  EXPECT_EQ(of_other, numbers(0, rounds));
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
