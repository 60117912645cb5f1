/// Calls that others have to agree to while nothing bounds run-ahead: what their thread waits for, and what it leaves.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/runtime/gate/agreed_call_fixture.hpp"

namespace sluice::gate {
namespace {

class without_a_bound : public agreed_call {
 protected:
  without_a_bound() { gate.set_run_ahead(0); }
};

TEST_F(without_a_bound, the_calling_thread_makes_what_is_agreed_on_at_once) {
  asked.agreed = true;
  asked.launch = [this] { note(1, comm); };
  sluice_agreed_call const call = asked.call(comm);
  EXPECT_EQ(gate.make_agreed(&call), 1);
  EXPECT_EQ(all_entries(), numbers(1, 2));
}

TEST_F(without_a_bound, the_calling_thread_does_not_wait_for_others) {
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

TEST_F(without_a_bound, calls_go_straight_again_when_it_has_been_made) {
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

TEST_F(without_a_bound, what_lies_there_keeps_what_comes_behind_it_from_waiting_whoever_looks) {
  std::atomic<bool> over{false};
  std::thread looks{[&] {
    while (!over) {
      gate.set_run_ahead(0);  // looks whether calls can go straight again
    }
  }};
  for (int round = 0; round < 500 && !testing::Test::HasFailure(); ++round) {
    question one;
    leave(one, 1, comm);
    auto behind = std::async(std::launch::async, [this] {
      EXPECT_EQ(cuda.set_current(context), CUDA_SUCCESS);
      note(2, comm);
    });
    EXPECT_EQ(behind.wait_for(10s), std::future_status::ready) << "round " << round;
    one.agreed = true;
    behind.get();
    EXPECT_EQ(cuda.synchronise(comm), CUDA_SUCCESS);
    EXPECT_EQ(take_entries(), numbers(1, 3));
  }
  over = true;
  looks.join();
}

TEST_F(without_a_bound, what_comes_soon_after_it_is_left_as_well) {
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

TEST_F(without_a_bound, and_a_submitter_the_calling_thread_waits) {
  gate.set_deferred(0);
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
TEST_F(without_a_bound,
       every_stream_keeps_its_order_while_calls_are_left_and_go_straight_by_turns) {
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

}  // namespace
}  // namespace sluice::gate
