/// What a host asks of training's launches: compute pauses and the run-ahead bound.

#include <gtest/gtest.h>

#include <chrono>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

TEST_F(a_host, holds_compute_from_a_requests_arrival_until_none_is_left) {
  auto& control = add(5);
  options_.pause = pause_mode::on_request;
  options_.pause_hysteresis = 1ms;
  options_.min_share = 0.0;
  start(8);
  control.close();
  send(0, 1, 0);
  EXPECT_EQ(pool_->claims(), 1) << "held when submit returns";
  ASSERT_TRUE(control.wait_for_runs(1));
  send(0, 2, 1);
  EXPECT_EQ(pool_->claims(), 1) << "one claim for all";
  control.open();
  EXPECT_EQ(answers_.wait_for(2).size(), 2U);
  EXPECT_TRUE(pool_->wait_for_claims(0));
}

TEST_F(a_host, holds_compute_while_requests_are_in_flight_and_as_long_as_gaps_say) {
  auto& control = add(5);
  options_.tick = 10ms;
  options_.min_share = 0.0;
  start(8);
  control.close();
  send(0, 1, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_EQ(pool_->claims(), 1);
  control.open();
  EXPECT_EQ(answers_.wait_for(1).size(), 1U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(pool_->wait_for_claims(0)) << "the host ends what is over";
    EXPECT_EQ(sum_of(ask(0, 1)), 11);
  }
  EXPECT_TRUE(pool_->wait_for_claims(0));
  EXPECT_GT(host_->snapshot().pauses.busy, 0ns);
}

TEST_F(a_host, names_the_model_whose_computation_outlasts_its_pause) {
  auto& control = add(5);
  options_.min_share = 0.99;
  start(8);
  control.close();
  send(0, 1);
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_TRUE(pool_->wait_for_claims(0));
  EXPECT_TRUE(pool_->wait_for_claims(1)) << "again";
  EXPECT_TRUE(pool_->wait_for_claims(0)) << "the first one may have ended before it computed";
  EXPECT_GE(host_->snapshot().pauses.cut_short, 2U);
  EXPECT_EQ(host_->snapshot().cut_short_models, std::vector<std::string>{"model0"});
  control.open();
  EXPECT_EQ(answers_.wait_for(1).size(), 1U);
}

TEST_F(a_host, leaves_claims_to_whoever_sees_launches) {
  add(5);
  auto const claimed = std::make_shared<heap_pool>(1);
  options_.lease = std::make_shared<compute_lease>(claimed, 0.0, compute_lease::change_on_gpu);
  options_.tick = 10ms;
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(claimed->claims_ever(), 0);
  EXPECT_EQ(claimed->announcements(), 0) << "the model was cold";
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(claimed->announcements(), 1);
  host_->announce_engine();
  EXPECT_EQ(claimed->announcements(), 2);
  EXPECT_EQ(host_->snapshot().pauses.announced, 2U);
  options_.lease->begins();
  EXPECT_EQ(host_->snapshot().pauses.pauses, 1U);
  options_.lease->drained(true);
  EXPECT_TRUE(claimed->wait_for_claims(0)) << "the host ends what is over";
}

TEST_F(a_host, holds_compute_for_engines_as_for_models) {
  auto& control = add(5);
  options_.min_share = 0.0;
  start(8);
  pool_->engine_works(true);
  EXPECT_EQ(pool_->claims(), 1);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(pool_->claims(), 1) << "the engine works still";
  control.close();
  send(0, 1);
  ASSERT_TRUE(control.wait_for_runs(2));
  pool_->engine_works(false);
  EXPECT_EQ(pool_->claims(), 1) << "a request runs";
  control.open();
  EXPECT_TRUE(pool_->wait_for_claims(0));
}

TEST_F(a_host, holds_compute_for_cold_starts_only_if_told_so) {
  add(5);
  options_.pause = pause_mode::on_cold_start;
  options_.pause_hysteresis = 0ms;
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_TRUE(pool_->wait_for_claims(0));
  EXPECT_EQ(pool_->claims_ever(), 1);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
  EXPECT_EQ(pool_->claims_ever(), 1);
}

TEST_F(a_host, holds_compute_for_a_cold_start_no_longer_than_the_load) {
  auto& control = add(5);
  options_.pause = pause_mode::on_cold_start;
  options_.pause_hysteresis = 0ms;
  start(8);
  control.close();
  send(0, 1);
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_EQ(pool_->claims_ever(), 1);
  EXPECT_TRUE(pool_->wait_for_claims(0)) << "the model is loaded, and a request runs";
}

TEST_F(a_host, takes_no_pause_from_training_that_has_all_of_the_time) {
  add(5);
  options_.min_share = 1.0;
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(pool_->claims_ever(), 0);
  EXPECT_EQ(host_->snapshot().pauses.cut_short, 0U);
  EXPECT_GT(host_->snapshot().pauses.withheld, 0ns);
}

TEST_F(a_host, ends_a_pause_under_a_request_for_trainings_share_and_takes_it_up_again) {
  auto& control = add(5);
  options_.pause = pause_mode::on_request;
  options_.min_share = 0.9;
  start(8);
  control.close();
  auto const before = std::chrono::steady_clock::now();
  send(0, 1);
  EXPECT_GE(pool_->claims_ever(), 1);
  EXPECT_GE(pool_->claimed_until(), before + 100ms);
  EXPECT_LE(pool_->claimed_until(), std::chrono::steady_clock::now() + 100ms);
  EXPECT_TRUE(pool_->wait_for_claims(0)) << "the request runs all the time";
  EXPECT_TRUE(pool_->wait_for_claims(1)) << "and gets the next second's pause";
  EXPECT_GE(pool_->claimed_until() - before, 1100ms);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.in_flight, 1U);
  EXPECT_GE(seen.pauses.pauses, 2U);
  EXPECT_GE(seen.pauses.cut_short, 1U);
  EXPECT_GE(seen.pauses.held, 100ms);
  EXPECT_GE(seen.pauses.withheld, 800ms);
  EXPECT_LE(seen.pauses.held_in_window, 100ms);
  EXPECT_DOUBLE_EQ(seen.pauses.min_share, 0.9);
  control.open();
  EXPECT_EQ(answers_.wait_for(1).size(), 1U);
  EXPECT_TRUE(pool_->wait_for_claims(0));
}

TEST_F(a_host, refuses_a_share_that_is_none) {
  add(5);
  options_.min_share = 1.5;
  EXPECT_THROW(start(8), error);
}

TEST_F(a_host, never_holds_compute_if_told_so) {
  add(5);
  options_.pause = pause_mode::never;
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(pool_->claims_ever(), 0);
}

TEST_F(a_host, ends_its_claim_when_all_waiting_requests_have_expired) {
  add(5);
  options_.pause_hysteresis = 0ms;
  start(8);
  pool_->fail_next(error_kind::deadline_exceeded);
  EXPECT_EQ(failure_of(ask(0, 1)), error_kind::deadline_exceeded);
  EXPECT_TRUE(pool_->wait_for_claims(0));
}

TEST_F(a_host, publishes_the_run_ahead_that_its_tightest_promise_permits) {
  add(5);
  add(7);
  models_[0].scheduling.goal = {.percentile = 0.99, .latency = scheduler::seconds{10.0}};
  models_[1].scheduling.goal = {.percentile = 0.99, .latency = scheduler::seconds{0.02}};
  start(8);
  EXPECT_GT(pool_->run_ahead(), 80us);
  EXPECT_LT(pool_->run_ahead(), 150us) << "a service of 10 ms is believed until it is measured";
}

TEST_F(a_host, publishes_more_run_ahead_when_services_prove_shorter) {
  add(5);
  models_[0].scheduling.goal = {.percentile = 0.99, .latency = scheduler::seconds{0.011}};
  options_.tick = 1ms;
  start(8);
  EXPECT_EQ(pool_->run_ahead(), 30us) << "a service of 10 ms is believed until it is measured";
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(sum_of(ask(0, i)), 10 + i);
  }
  EXPECT_TRUE(pool_->wait_for_run_ahead_above(60us));
}

TEST_F(a_host, publishes_the_run_ahead_that_the_policy_names) {
  add(5);
  options_.run_ahead = 70us;
  start(8);
  EXPECT_EQ(pool_->run_ahead(), 70us);
}

}  // namespace
}  // namespace sluice::server::testing
