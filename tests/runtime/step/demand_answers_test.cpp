/// What demands get while there is no memory yet; what they get of it demands_test.cpp and revocation_test.cpp say, with a
/// server.

#include "runtime/step/demand_answers.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/operator_gate.hpp"

namespace sluice::step {
namespace {

/// Of threads that saw the demand at that time.
class noticing_gate final : public launch_gate {
 public:
  bool close(std::int64_t /*deadline_ns*/) override { return true; }
  bool wait_idle(std::int64_t /*deadline_ns*/) override { return true; }
  void open() override {}
  void abort_begin() override {}
  void abort_end() override {}
  void set_urgent(bool /*urgent*/) override {}
  [[nodiscard]] std::int64_t demand_seen_ns() const override { return seen_ns; }
  void demand_answered(memhandover::demand const& which) override { answered = which.number; }

  std::int64_t seen_ns = 0;
  std::uint32_t answered = 0;
};

class demand_answers_test : public testing::Test {
 protected:
  static memhandover::demand demand(std::uint32_t number) {
    return {number, 4, memhandover::monotonic_ns(), [] { return true; }};
  }

  std::mutex mutex_;
  noticing_gate gate_;
  micro_batch_cycle cycle_{mutex_, &gate_, gate_, [](bool /*outlived*/) {}};
  demand_answers answers_{mutex_, cycle_, &gate_, gate_};
};

TEST_F(demand_answers_test, a_job_that_is_being_set_up_gives_nothing_and_holds_nobody) {
  auto const wanted = demand(7);
  auto const given = answers_.answer(wanted);
  EXPECT_TRUE(given.chunks.empty());
  EXPECT_FALSE(given.afterwards);
  EXPECT_GE(given.closed_ns, wanted.awake_ns);
  EXPECT_EQ(given.noticed_ns, wanted.awake_ns);
  EXPECT_EQ(gate_.answered, 7U);
  EXPECT_FALSE(answers_.urgent());
  demand_answers::lock_type lock{mutex_};
  answers_.let_pass(lock);
  EXPECT_TRUE(lock.owns_lock());
  EXPECT_EQ(answers_.count(), 0U);
}

TEST_F(demand_answers_test, a_demand_was_noticed_when_the_first_thread_saw_it) {
  auto const wanted = demand(8);
  gate_.seen_ns = wanted.awake_ns - 5;
  EXPECT_EQ(answers_.answer(wanted).noticed_ns, wanted.awake_ns - 5);
  gate_.seen_ns = wanted.awake_ns + 5;
  EXPECT_EQ(answers_.answer(wanted).noticed_ns, wanted.awake_ns);
}

TEST(demand_answers_on_host_test, without_a_gate_nothing_is_let_pass) {
  std::mutex mutex;
  operator_gate operators;
  micro_batch_cycle cycle{mutex, nullptr, operators, [](bool /*outlived*/) {}};
  demand_answers answers{mutex, cycle, nullptr, operators};
  EXPECT_TRUE(answers.answer({1, 2, 3, [] { return true; }}).chunks.empty());
  demand_answers::lock_type lock{mutex};
  answers.let_pass(lock);
}

}  // namespace
}  // namespace sluice::step
