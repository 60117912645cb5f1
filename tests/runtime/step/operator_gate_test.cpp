/// A demand takes no memory from under an operator of the host, and no operator begins on memory that
/// is being taken.

#include "runtime/step/operator_gate.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/training_memory.hpp"
#include "tests/runtime/step/fault_world.hpp"
#include "tests/runtime/step/injected_calls.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr std::int64_t ever = std::numeric_limits<std::int64_t>::max();

/// A job in a micro-batch, and a server that is about to take its memory.
class taken_memory_test : public testing::Test {
 protected:
  taken_memory_test() {
    world.start_broker();
    memory.emplace(world.job());
    server = world.join_server();
    all = server->shape().bytes();
    memory->begin();
  }

  fault_world world{"host"};
  std::optional<step::training_memory> memory;
  std::shared_ptr<memhandover::serving_pool> server;
  std::uint64_t all = 0;
};

TEST_F(taken_memory_test, what_steers_an_operator_stays_until_it_has_ended) {
  auto* const block = memory->allocate_arena(all);
  auto& word = *reinterpret_cast<std::atomic<std::uint64_t>*>(block);

  auto const& demand = memory->client().view().controls()[memory->client().slot()].demand;
  auto const none_yet = demand.load();
  memory->operators().operator_begin();
  std::atomic<bool> had{false};
  std::jthread serving{[&] {
    EXPECT_NO_THROW({
      auto const where = server->acquire(all / 2, steady_clock::now() + 30s);
      had = where.bytes() >= all / 2;
    });
  }};
  while (demand.load() == none_yet) {
    std::this_thread::yield();
  }
  std::uint64_t count = 0;
  bool untouched = true;
  for (auto const until = steady_clock::now() + 100ms; steady_clock::now() < until; ++count) {
    untouched = untouched && word.fetch_add(1) == count;
  }
  EXPECT_TRUE(untouched);
  EXPECT_FALSE(had);
  memory->operators().operator_end();
  serving.join();

  EXPECT_TRUE(had);
  EXPECT_EQ(memory->state(), step::arena_state::revoked);
  memory->discard();
  EXPECT_TRUE(memory->free(block));
}

TEST_F(taken_memory_test, memory_that_cannot_be_taken_stays_and_operators_go_on) {
  auto* const block = memory->allocate_arena(all - 4096);
  block[0] = std::byte{0x5a};

  fail_call("mmap", 2, ENOMEM);  // the one that puts private pages in place
  EXPECT_THROW((void)server->acquire(all / 2, steady_clock::now() + 30s), error);
  ASSERT_TRUE(call_failed());
  memory->operators().operator_begin();
  EXPECT_EQ(block[0], std::byte{0x5a});
  EXPECT_TRUE(memory->free(memory->allocate_arena(4096)));
  EXPECT_EQ(memory->state(), step::arena_state::sound);
  memory->operators().operator_end();

  EXPECT_GE(server->acquire(all / 2, steady_clock::now() + 30s).bytes(), all / 2);
  EXPECT_EQ(memory->state(), step::arena_state::revoked);
  memory->discard();
  EXPECT_TRUE(memory->free(block));
}

TEST_F(taken_memory_test, what_a_micro_batch_has_run_for_in_vain_is_counted) {
  auto const& box = memory->client().mailbox();
  memory->discard();
  EXPECT_EQ(box.discarded_ns.load(), 0U);  // nothing had been taken away
  EXPECT_EQ(memory->reopened_ns(), 0);

  auto const before = memhandover::monotonic_ns();
  memory->begin();
  auto* const block = memory->allocate_arena(all);
  auto const begun = memhandover::monotonic_ns();
  std::this_thread::sleep_for(20ms);  // what it runs for
  auto const ending = memhandover::monotonic_ns();
  EXPECT_GE(server->acquire(all / 2, steady_clock::now() + 30s).bytes(), all / 2);
  auto const ended = memhandover::monotonic_ns();
  memory->discard();
  EXPECT_TRUE(memory->free(block));

  EXPECT_GE(box.discarded_ns.load(), static_cast<std::uint64_t>(ending - begun));
  EXPECT_LE(box.discarded_ns.load(), static_cast<std::uint64_t>(ended - before));
  EXPECT_GE(memory->reopened_ns(), ending);
  EXPECT_LE(memory->reopened_ns(), memhandover::monotonic_ns());
}

using step::operator_memory;

/// Threads run operators, each of the memory that it is given, while the gate is shut again and again: how often one ran
/// beside a shut gate.
std::uint64_t slips_of(std::vector<operator_memory> const& threads,
                       bool (step::operator_gate::*shut)(std::int64_t)) {
  step::operator_gate gate;
  std::atomic<bool> closed{false};
  std::atomic<bool> done{false};
  std::atomic<std::uint64_t> slips{0};
  std::vector<std::thread> computing;
  for (auto const uses : threads) {
    computing.emplace_back([&, uses] {
      while (!done) {
        gate.operator_begin(uses);
        slips += closed ? 1 : 0;
        std::this_thread::yield();
        slips += closed ? 1 : 0;
        gate.operator_end(uses);
      }
    });
  }
  for (int i = 0; i < 20'000; ++i) {
    EXPECT_TRUE((gate.*shut)(ever));
    EXPECT_TRUE(gate.wait_idle(memhandover::monotonic_ns() + 60'000'000'000));
    closed = true;
    closed = false;
    gate.open();
  }
  done = true;
  for (auto& thread : computing) {
    thread.join();
  }
  return slips;
}

TEST(operator_gate_test, no_operator_in_the_arena_runs_between_close_and_open) {
  EXPECT_EQ(slips_of(std::vector(3, operator_memory::arena), &step::operator_gate::close), 0U);
}

TEST(operator_gate_test, no_operator_at_all_runs_between_close_all_and_open) {
  EXPECT_EQ(slips_of({operator_memory::arena, operator_memory::lasting, operator_memory::lasting},
                     &step::operator_gate::close_all),
            0U);
}

TEST(operator_gate_test, what_does_not_use_the_arena_runs_while_that_is_taken) {
  step::operator_gate gate;
  gate.operator_begin(operator_memory::lasting);
  ASSERT_TRUE(gate.close(ever));
  EXPECT_TRUE(gate.wait_idle(memhandover::monotonic_ns() + 60'000'000'000));
  gate.operator_end(operator_memory::lasting);
  EXPECT_EQ(gate.unit_ended_ns(), 0) << "nobody has waited for it";
  gate.operator_begin(operator_memory::lasting);  // and is not held
  gate.operator_end(operator_memory::lasting);
  gate.open();
}

/// Of an operator outside of the arena.
void expect_held_until_it_opens(step::operator_gate& gate) {
  std::atomic<bool> begun{false};
  std::jthread held{[&] {
    gate.operator_begin(operator_memory::lasting);
    begun = true;
    gate.operator_end(operator_memory::lasting);
  }};
  for (auto const until = steady_clock::now() + 50ms; steady_clock::now() < until;) {
    EXPECT_FALSE(begun);
  }
  gate.open();
  held.join();
  EXPECT_TRUE(begun);
}

TEST(operator_gate_test, whoever_is_held_outside_of_the_arena_goes_on_when_the_gate_opens) {
  step::operator_gate gate;
  gate.operator_begin(operator_memory::lasting);
  ASSERT_TRUE(gate.close_all(ever));
  EXPECT_FALSE(gate.wait_idle(memhandover::monotonic_ns() + 1'000'000)) << "one still runs";
  gate.operator_end(operator_memory::lasting);
  EXPECT_TRUE(gate.wait_idle(memhandover::monotonic_ns() + 60'000'000'000));
  EXPECT_GT(gate.unit_ended_ns(), 0);

  expect_held_until_it_opens(gate);
}

TEST(operator_gate_test, what_is_closed_to_all_stays_so_until_it_is_opened) {
  step::operator_gate gate;
  ASSERT_TRUE(gate.close_all(ever));
  ASSERT_TRUE(gate.close(ever));
  expect_held_until_it_opens(gate);
}

TEST(operator_gate_test, whoever_is_held_asks_each_time_that_memory_is_parked) {
  step::operator_gate gate;
  std::atomic<int> asked{0};
  gate.on_held_parked([&asked] { ++asked; });
  std::atomic<bool> ends{false};
  std::jthread computes{[&] {
    while (!ends) {
      gate.operator_begin(operator_memory::lasting);
      gate.operator_end(operator_memory::lasting);
    }
  }};
  for (int parking = 1; parking <= 200; ++parking) {
    ASSERT_TRUE(gate.close_all(ever));
    ASSERT_TRUE(gate.wait_idle(memhandover::monotonic_ns() + 60'000'000'000));
    EXPECT_LT(asked, parking) << "before anything is parked nobody asks";
    gate.set_parked(true);
    while (asked < parking) {
      std::this_thread::yield();
    }
    gate.set_parked(false);
    gate.open();
  }
  ends = true;
}

TEST(operator_gate_test, an_operator_that_does_not_end_is_given_up_at_the_deadline) {
  step::operator_gate gate;
  gate.operator_begin();
  ASSERT_TRUE(gate.close(ever));
  EXPECT_FALSE(gate.wait_idle(memhandover::monotonic_ns() + 1'000'000));
  gate.open();
  gate.operator_end();
  ASSERT_TRUE(gate.close(ever));
  EXPECT_TRUE(gate.wait_idle(memhandover::monotonic_ns() + 60'000'000'000));
  gate.open();
}

}  // namespace
}  // namespace sluice::test
