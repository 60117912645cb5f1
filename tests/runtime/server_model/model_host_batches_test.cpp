/// Requests of a model that are computed together.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;

/// With as many threads as the parameter says that compute; 0: the executor does.
class a_batching_host : public a_host, public ::testing::WithParamInterface<std::size_t> {
 protected:
  a_batching_host() { options_.computing_threads = GetParam(); }

  model_control& add_batching(batching_rules rules) {
    auto& control = add(5);
    control.allow_batches();
    rules.is_dynamic = true;
    models_.back().batching = std::move(rules);
    return control;
  }
  /// Requests that come while another one is computed, which `control` holds.
  void send_behind_one(model_control& control, int count) {
    control.close();
    send(0, 0, 0);
    ASSERT_TRUE(control.wait_for_runs(1));
    for (int i = 1; i <= count; ++i) {
      send(0, i, i);
    }
  }
  void expect_sums(std::size_t count) {
    auto const got = answers_.wait_for(count);
    ASSERT_EQ(got.size(), count);
    for (auto const& [which, result] : got) {
      EXPECT_EQ(sum_of(result), 10 + which);
    }
  }
  /// By request: threads that compute give their answers beside each other.
  [[nodiscard]] std::vector<infer_result> answers_to(std::size_t count) {
    auto got = answers_.wait_for(count);
    std::sort(got.begin(), got.end(),
              [](auto const& a, auto const& b) { return a.first < b.first; });
    std::vector<infer_result> all;
    for (auto& each : got) {
      all.push_back(std::move(each.second));
    }
    all.resize(count, error{error_kind::internal, "no answer came"});
    return all;
  }
  void send_of_priority(std::uint64_t priority, int which) {
    infer_request request;
    request.model = "model0";
    request.priority = priority;
    request.inputs.push_back(number("input", which));
    host_->submit(0, std::move(request), answers_.take(which));
  }
  [[nodiscard]] static request_times times_in(infer_result const& result) {
    return std::get<infer_response>(result).times.value();
  }
};

INSTANTIATE_TEST_SUITE_P(, a_batching_host, ::testing::Values(0, 3));

TEST_P(a_batching_host, computes_together_what_has_come_meanwhile) {
  auto& control = add_batching({.max_batch_size = 4});
  start(8);
  send_behind_one(control, 6);
  control.open();
  expect_sums(7);
  EXPECT_THAT(control.batches(), ElementsAre(1, 4, 2));
}

TEST_P(a_batching_host, says_of_each_answer_what_it_was_computed_with) {
  auto& control = add_batching({.max_batch_size = 4});
  start(8);
  send_behind_one(control, 3);
  control.open();
  auto const got = answers_to(4);
  EXPECT_EQ(times_in(got[0]).batch, batch_share{});
  for (std::size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(times_in(got[i]).batch,
              (batch_share{.requests = 3, .samples = 3, .is_first = i == 1}));
  }
}

TEST_P(a_batching_host, waits_for_others_where_it_is_told_so_and_no_longer) {
  auto& control = add_batching({.max_batch_size = 3, .max_queue_delay = 1h});
  start(8);
  send(0, 1, 1);
  send(0, 2, 2);
  send(0, 3, 3);
  expect_sums(3);
  EXPECT_THAT(control.batches(), ElementsAre(3));
}

TEST_P(a_batching_host, does_not_wait_beyond_its_delay) {
  auto& control = add_batching({.max_batch_size = 3, .max_queue_delay = 20ms});
  start(8);
  send(0, 1, 1);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_GE(times_in(got[0].second).queue, 20ms);
  EXPECT_THAT(control.batches(), ElementsAre(1));
}

TEST_P(a_batching_host, does_not_wait_beyond_what_a_deadline_allows) {
  auto& control = add_batching({.max_batch_size = 3, .max_queue_delay = 1h});
  start(8);
  send(0, 1, 1);
  send(0, 2, 2, 200ms);
  auto const got = answers_.wait_for(2);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_FALSE(failure_of(got[0].second));
  EXPECT_FALSE(failure_of(got[1].second));
  EXPECT_THAT(control.batches(), ElementsAre(2));
}

TEST_P(a_batching_host, does_not_wait_when_it_is_to_end) {
  add_batching({.max_batch_size = 3, .max_queue_delay = 1h});
  start(8);
  send(0, 1, 1);
  EXPECT_TRUE(host_->stop(patience));
  expect_sums(1);
}

TEST_P(a_batching_host, lets_other_models_go_meanwhile) {
  add_batching({.max_batch_size = 3, .max_queue_delay = 1h});
  add(7);
  start(8);
  send(0, 1, 1);
  send(1, 2, 2);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(sum_of(got[0].second), 16);
}

TEST_P(a_batching_host, fails_nobody_for_anothers_sake) {
  auto& control = add_batching({.max_batch_size = 4});
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  send(0, 1, 1);
  send(0, -2, 2);
  send(0, 3, 3);
  control.open();
  auto const got = answers_to(4);
  EXPECT_EQ(sum_of(got[1]), 11);
  EXPECT_EQ(failure_of(got[2]), error_kind::invalid_argument);
  EXPECT_EQ(sum_of(got[3]), 13);
  EXPECT_THAT(control.batches(), ElementsAre(1, 3, 1, 1, 1));
}

TEST_P(a_batching_host, stops_trying_where_the_model_fails_for_batches_alone) {
  auto& control = add_batching({.max_batch_size = 2});
  control.fail_batches();
  start(8);
  send_behind_one(control, 8);
  control.open();
  expect_sums(9);
  EXPECT_THAT(control.batches(), ElementsAre(1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1));
}

TEST_P(a_batching_host, computes_one_by_one_what_the_model_cannot_put_together) {
  auto& control = add(5);
  models_.back().batching = {.max_batch_size = 4, .is_dynamic = true};
  start(8);
  send_behind_one(control, 3);
  control.open();
  expect_sums(4);
  EXPECT_THAT(control.batches(), ElementsAre(1, 1, 1, 1));
}

TEST_P(a_batching_host, puts_nobody_together_that_has_to_be_alone) {
  auto& control = add_batching({.max_batch_size = 4});
  start(8);
  send_behind_one(control, 1);
  infer_request alone;
  alone.model = "model0";
  alone.is_alone = true;
  alone.inputs.push_back(number("input", 2));
  host_->submit(0, std::move(alone), answers_.take(2));
  send(0, 3, 3);
  control.open();
  expect_sums(4);
  EXPECT_THAT(control.batches(), ElementsAre(1, 2, 1));
}

TEST_P(a_batching_host, goes_by_priority) {
  auto& control = add_batching({.max_batch_size = 1,
                                .preserve_ordering = true,
                                .priority_levels = 2,
                                .default_priority = 2});
  start(8);
  send_behind_one(control, 2);
  send_of_priority(1, 3);
  control.open();
  auto const got = answers_.wait_for(4);
  ASSERT_EQ(got.size(), 4U);
  EXPECT_EQ(got[1].first, 3);
  EXPECT_EQ(got[2].first, 1);
}

TEST_P(a_batching_host, answers_in_order_where_that_is_wanted) {
  auto& control = add_batching({.max_batch_size = 2, .preserve_ordering = true});
  start(8);
  send_behind_one(control, 40);
  control.open();
  auto const got = answers_.wait_for(41);
  ASSERT_EQ(got.size(), 41U);
  for (int i = 0; i < 41; ++i) {
    EXPECT_EQ(got[static_cast<std::size_t>(i)].first, i);
  }
}

TEST_P(a_batching_host, refuses_what_has_waited_for_longer_than_its_priority_allows) {
  auto& control = add_batching({.max_batch_size = 1,
                                .priority_levels = 2,
                                .default_priority = 2,
                                .policies = {{1, {.default_timeout = 1ms}}}});
  start(8);
  send_behind_one(control, 0);
  send_of_priority(1, 1);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(got[0].first, 1);
  EXPECT_EQ(failure_of(got[0].second), error_kind::deadline_exceeded);
  control.open();
  EXPECT_EQ(sum_of(answers_to(2)[0]), 10);
}

TEST_P(a_batching_host, puts_behind_what_is_late_where_it_is_to_be_delayed) {
  auto& control = add_batching(
      {.max_batch_size = 1,
       .preserve_ordering = true,
       .priority_levels = 2,
       .default_priority = 1,
       .policies = {
           {1, {.on_timeout = queue_policy::timeout_action::delay, .default_timeout = 1us}}}});
  start(8);
  send_behind_one(control, 1);
  send_of_priority(2, 2);
  control.open();
  auto const got = answers_.wait_for(3);
  ASSERT_EQ(got.size(), 3U);
  EXPECT_EQ(got[1].first, 2);
  EXPECT_EQ(got[2].first, 1);
}

TEST_P(a_batching_host, refuses_more_than_a_priority_may_have_waiting) {
  auto& control = add_batching({.max_batch_size = 1, .default_policy = {.max_queue_size = 2}});
  start(8);
  send_behind_one(control, 3);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(got[0].first, 3);
  EXPECT_EQ(failure_of(got[0].second), error_kind::unavailable);
  control.open();
  EXPECT_EQ(answers_.wait_for(4).size(), 4U);
}

TEST_P(a_batching_host, gives_each_its_part_of_the_time_to_the_scheduler) {
  auto& control = add_batching({.max_batch_size = 8});
  start(8);
  send_behind_one(control, 5);
  control.open();
  expect_sums(6);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.models.at(0).requests, 6U);
  EXPECT_EQ(seen.models.at(0).failed, 0U);
  EXPECT_EQ(seen.in_flight, 0U);
}

}  // namespace
}  // namespace sluice::server::testing
