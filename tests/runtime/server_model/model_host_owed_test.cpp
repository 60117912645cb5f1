/// A host gives memory back that is owed to a job: before idle timeouts, after what it has accepted.

#include <gtest/gtest.h>

#include <string>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

class owed_memory_of_a_host : public a_host {
 protected:
  owed_memory_of_a_host() { options_.tick = 5ms; }
};

TEST_F(owed_memory_of_a_host, comes_back_from_idle_models_before_their_timeouts) {
  auto& control = add(5);
  start(4);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  pool_->set_owed(4, steady_clock::now(), 1s);
  EXPECT_TRUE(control.wait_for_unloads(1));
  EXPECT_TRUE(pool_->wait_until_met());
  EXPECT_EQ(pool_->usage().serving_bytes, 0U);
}

TEST_F(owed_memory_of_a_host, is_not_touched_before_it_is_owed) {
  auto& control = add(5);
  start(4);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  auto const at = steady_clock::now() + 200ms;
  pool_->set_owed(4, at, 1s);
  EXPECT_TRUE(control.wait_for_unloads(1));
  EXPECT_GE(steady_clock::now(), at);
  EXPECT_TRUE(pool_->wait_until_met());
}

TEST_F(owed_memory_of_a_host, comes_from_as_few_models_as_it_takes_who_is_asked_least_first) {
  auto& first = add(5);
  auto& second = add(7);
  auto& third = add(9);
  start(6);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(sum_of(ask(2, 1)), 19);
  for (int i = 0; i < 50; ++i) {  // far more than their loads may differ
    EXPECT_EQ(sum_of(ask(0, 2)), 12);
    EXPECT_EQ(sum_of(ask(2, 2)), 20);
  }
  pool_->set_owed(2, steady_clock::now(), 1s);
  EXPECT_TRUE(second.wait_for_unloads(1));
  EXPECT_TRUE(pool_->wait_until_met());
  EXPECT_EQ(sum_of(ask(0, 3)), 13);
  EXPECT_EQ(sum_of(ask(2, 3)), 21);
  EXPECT_EQ(first.loads(), 1);
  EXPECT_EQ(third.loads(), 1);
}

TEST_F(owed_memory_of_a_host, comes_after_answers_to_what_was_accepted_and_nothing_more_is) {
  auto& control = add(5);
  add(7);
  start(4);
  control.close();
  send(0, 1, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  send(0, 2, 1);
  pool_->set_owed(4, steady_clock::now(), 1500ms);
  // From the next tick on the model takes no more.
  int which = 2;
  error refused{error_kind::internal, "none"};
  for (auto const until = steady_clock::now() + patience;
       refused.kind() == error_kind::internal && steady_clock::now() < until; ++which) {
    send(0, 3, which, 10ms);
    auto const got = answers_.wait_for(static_cast<std::size_t>(which - 1));
    ASSERT_EQ(got.size(), static_cast<std::size_t>(which - 1));
    if (auto const failure = std::get<error>(got.back().second);
        failure.kind() == error_kind::unavailable) {
      refused = failure;
    }
  }
  ASSERT_EQ(refused.kind(), error_kind::unavailable);
  EXPECT_NE(std::string{refused.what()}.find("model 'model0' gives its memory back"),
            std::string::npos)
      << refused.what();
  EXPECT_EQ(refused.retry_after(), 1500ms);
  control.open();
  auto const got = answers_.wait_for(static_cast<std::size_t>(which));
  ASSERT_EQ(got.size(), static_cast<std::size_t>(which));
  int answered = 0;
  for (auto const& each : got) {
    answered += std::holds_alternative<infer_response>(each.second) ? 1 : 0;
  }
  EXPECT_EQ(answered, 2) << "both that had been accepted";
  EXPECT_TRUE(control.wait_for_unloads(1));
  EXPECT_TRUE(pool_->wait_until_met());
}

TEST_F(owed_memory_of_a_host, is_not_what_a_cold_start_gets_and_no_model_goes_for_that) {
  auto& lasting = add(5);
  models_[0].always_warm = true;
  auto& passing = add(7);
  auto& cold = add(9);
  start(6);
  ASSERT_TRUE(host_->warm_up());
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  pool_->set_owed(6, steady_clock::now(), 2s);  // more than can be had
  EXPECT_TRUE(passing.wait_for_unloads(1));
  auto const failure = std::get<error>(ask(2, 1));
  EXPECT_EQ(failure.kind(), error_kind::out_of_memory);
  EXPECT_EQ(failure.retry_after(), 2s);
  EXPECT_EQ(cold.loads(), 0);
  EXPECT_EQ(lasting.unloads(), 0) << "what is always warm stays";
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(owed_memory_of_a_host, is_forgotten_when_nobody_is_owed_any_more) {
  auto& control = add(5);
  start(8);
  control.close();
  send(0, 1, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  pool_->set_owed(8, steady_clock::now(), 1s);
  for (int which = 1;; ++which) {
    send(0, 3, which, 10ms);
    auto const got = answers_.wait_for(static_cast<std::size_t>(which));
    ASSERT_EQ(got.size(), static_cast<std::size_t>(which));
    if (std::get<error>(got.back().second).kind() == error_kind::unavailable) {
      asked_ = got.size();
      break;
    }
  }
  pool_->set_owed(0, steady_clock::now(), 1s);  // the job has ended
  control.open();
  ++asked_;  // the first
  ASSERT_EQ(answers_.wait_for(asked_).size(), asked_);
  for (auto const until = steady_clock::now() + patience;;) {
    auto const answer = ask(0, 4);
    if (std::holds_alternative<infer_response>(answer)) {
      break;
    }
    ASSERT_LT(steady_clock::now(), until);
  }
}

TEST_F(owed_memory_of_a_host, is_gathered_for_a_job_that_needs_it_while_there_are_no_requests) {
  add(5);
  start(4);
  pool_->set_needed(1);
  EXPECT_TRUE(pool_->wait_for_gatherings(1));
  EXPECT_FALSE(pool_->is_needed());
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(owed_memory_of_a_host, is_not_gathered_any_longer_once_a_request_comes_and_is_afterwards) {
  add(5);
  start(4);
  pool_->set_needed(3);
  for (int gathering = 1; gathering < 3; ++gathering) {
    EXPECT_TRUE(pool_->wait_for_gatherings(gathering));
    EXPECT_EQ(sum_of(ask(0, gathering)), 10 + gathering) << "it waits for nobody";
  }
  EXPECT_TRUE(pool_->wait_for_gatherings(3));
  EXPECT_FALSE(pool_->is_needed());
}

}  // namespace
}  // namespace sluice::server::testing
