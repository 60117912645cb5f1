#include "runtime/server/model_host.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

#include "tests/runtime/server_model/heap_pool.hpp"
#include "tests/runtime/server_model/sum_model.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t model_bytes = 2 * heap_pool::chunk;

/// A host over a pool of heap memory, with as many models as a test wants.
class a_host : public ::testing::Test {
 protected:
  model_control& add(unsigned char weight, scheduler::seconds idle = scheduler::seconds{1e6},
                     std::uint64_t bytes = model_bytes) {
    controls_.push_back(std::make_shared<model_control>());
    served_model made;
    made.name = "model" + std::to_string(models_.size());
    made.version = "1";
    made.model = std::make_unique<sum_model>(bytes, weight, controls_.back());
    made.scheduling.goal.latency = scheduler::seconds{0.1};
    made.scheduling.limits = {idle, idle};
    models_.push_back(std::move(made));
    return *controls_.back();
  }

  void start(std::uint32_t pool_chunks, std::uint32_t training_chunks = 0) {
    pool_ = std::make_shared<heap_pool>(pool_chunks, training_chunks);
    host_ = std::make_unique<model_host>(options_, pool_, std::move(models_));
  }

  void send(std::size_t model, std::int64_t value, int which = 0,
            std::optional<std::chrono::microseconds> timeout = std::nullopt) {
    infer_request request;
    request.model = "model" + std::to_string(model);
    request.id = std::to_string(which);
    request.timeout = timeout;
    request.inputs.push_back(number("input", value));
    host_->submit(model, std::move(request), answers_.take(which));
  }

  infer_result ask(std::size_t model, std::int64_t value) {
    auto const before = asked_++;
    send(model, value);
    auto got = answers_.wait_for(before + 1);
    return got.size() > before ? got[before].second : error{error_kind::internal, "no answer came"};
  }

  void TearDown() override {
    for (auto const& each : controls_) {
      each->open();
    }
    if (host_) {
      EXPECT_TRUE(host_->stop(patience));
      host_.reset();
      EXPECT_EQ(pool_->usage().serving_bytes, 0U) << "memory was leaked";
      EXPECT_EQ(pool_->claims(), 0) << "a compute claim was leaked";
    }
  }

  host_options options_;
  std::vector<served_model> models_;
  std::vector<std::shared_ptr<model_control>> controls_;
  answers answers_;
  std::size_t asked_ = 0;
  std::shared_ptr<heap_pool> pool_;
  std::unique_ptr<model_host> host_;
};

TEST_F(a_host, loads_a_model_for_its_first_request_only) {
  auto& control = add(5);
  start(8);
  EXPECT_EQ(host_->state(0), model_state::cold);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
  EXPECT_EQ(control.loads(), 1);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(pool_->usage().serving_bytes, model_bytes);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.models[0].cold_starts, 1U);
  EXPECT_EQ(seen.cold.n, 1U);
  EXPECT_EQ(seen.warm.n, 1U);
  ASSERT_EQ(seen.handovers.size(), 1U);
  EXPECT_EQ(seen.handovers[0].report.bytes, model_bytes);
}

TEST_F(a_host, answers_with_the_id_and_version_that_it_computed) {
  add(5);
  start(8);
  send(0, 1, 77);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  auto const& response = std::get<infer_response>(got[0].second);
  EXPECT_EQ(response.id, "77");
  EXPECT_EQ(response.version, "1");
  EXPECT_EQ(response.model, "model0");
}

TEST_F(a_host, gives_the_memory_of_an_idle_model_back_and_loads_it_again) {
  auto& control = add(5, scheduler::seconds{0.01});
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_TRUE(control.wait_for_unloads(1));
  EXPECT_TRUE(pool_->wait_for_serving(0));
  EXPECT_EQ(sum_of(ask(0, 3)), 13);
  EXPECT_EQ(control.loads(), 2);
}

TEST_F(a_host, goes_to_sleep_while_it_is_being_watched) {
  auto& control = add(5, scheduler::seconds{0.05});
  start(8);
  for (int look = 0; look < 100; ++look) {
    EXPECT_EQ(host_->snapshot().models[0].state, model_state::cold) << "watching woke it";
  }
  EXPECT_EQ(control.loads(), 0);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  std::atomic<bool> released = false;
  std::thread watcher{[&] {
    while (!released) {
      (void)host_->snapshot();
      (void)host_->state(0);
    }
  }};
  EXPECT_TRUE(pool_->wait_for_serving(0));
  released = true;
  watcher.join();
}

TEST_F(a_host, answers_in_order_of_arrival) {
  auto& control = add(5);
  add(7);
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  for (int i = 1; i < 9; ++i) {
    send(static_cast<std::size_t>(i % 2), i, i);
  }
  EXPECT_EQ(host_->snapshot().in_flight, 9U);
  control.open();
  auto const got = answers_.wait_for(9);
  ASSERT_EQ(got.size(), 9U);
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(got[static_cast<std::size_t>(i)].first, i);
    EXPECT_EQ(sum_of(got[static_cast<std::size_t>(i)].second), i + (i % 2 == 0 ? 10 : 14));
  }
}

TEST_F(a_host, refuses_what_does_not_fit_the_queue_and_answers_the_rest) {
  auto& control = add(5);
  models_[0].max_queue = 3;
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  for (int i = 1; i < 5; ++i) {
    send(0, i, i);
  }
  auto const refused = answers_.wait_for(2);
  ASSERT_EQ(refused.size(), 2U) << "refusals must not wait for the computation";
  for (auto const& each : refused) {
    EXPECT_GE(each.first, 3);
    EXPECT_EQ(failure_of(each.second), error_kind::unavailable);
  }
  control.open();
  EXPECT_EQ(answers_.wait_for(5).size(), 5U);
  EXPECT_EQ(host_->snapshot().failed, 2U);
}

TEST_F(a_host, refuses_a_request_whose_time_is_over_while_another_computes) {
  auto& control = add(5);
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  send(0, 1, 1, 5ms);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(got[0].first, 1);
  EXPECT_EQ(failure_of(got[0].second), error_kind::deadline_exceeded);
  control.open();
  EXPECT_EQ(answers_.wait_for(2).size(), 2U);
}

TEST_F(a_host, fails_the_requests_of_a_model_that_gets_no_memory_and_serves_the_next) {
  auto& control = add(5);
  start(8);
  for (auto const kind : {error_kind::out_of_memory, error_kind::deadline_exceeded}) {
    pool_->fail_next(kind);
    EXPECT_EQ(failure_of(ask(0, 1)), kind);
    EXPECT_EQ(host_->state(0), model_state::cold);
    EXPECT_EQ(control.loads(), 0);
  }
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(a_host, gives_memory_back_when_a_load_fails) {
  auto& control = add(5);
  start(8);
  control.fail_load(error_kind::internal);
  EXPECT_EQ(failure_of(ask(0, 1)), error_kind::internal);
  EXPECT_TRUE(pool_->wait_for_serving(0));
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(a_host, takes_memory_from_training_before_it_evicts_a_model) {
  auto& first = add(5);
  add(7);
  start(4, 4);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(first.loads(), 1);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(pool_->usage().training_bytes, 0U);
  EXPECT_EQ(host_->snapshot().handovers[1].report.bytes_reclaimed, model_bytes);
}

TEST_F(a_host, evicts_the_longest_idle_model_when_memory_is_short) {
  add(5);
  add(7);
  add(9);
  start(5);  // room for two
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);  // the other one is now the longest idle
  EXPECT_EQ(sum_of(ask(2, 1)), 19);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(host_->state(1), model_state::cold);
  EXPECT_EQ(host_->state(2), model_state::warm);
}

TEST_F(a_host, puts_small_models_into_one_chunk_and_computes_each_out_of_its_own_part) {
  add(5, scheduler::seconds{1e6}, 1000);
  add(7, scheduler::seconds{1e6}, 1000);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
  EXPECT_EQ(pool_->usage().serving_bytes, heap_pool::chunk);
  EXPECT_EQ(pool_->note(0), "2 models");
}

TEST_F(a_host, keeps_a_shared_chunk_until_the_last_of_its_models_goes) {
  auto& first = add(5, scheduler::seconds{0.01}, 1000);
  add(7, scheduler::seconds{1e6}, 1000);
  add(9, scheduler::seconds{1e6}, 8 * heap_pool::chunk);
  start(8);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  ASSERT_TRUE(first.wait_for_unloads(1));
  EXPECT_EQ(sum_of(ask(1, 2)), 16);
  EXPECT_EQ(pool_->usage().serving_bytes, heap_pool::chunk);
  EXPECT_EQ(sum_of(ask(2, 1)), 19) << "evicting the last one frees the chunk";
  EXPECT_EQ(host_->state(1), model_state::cold);
}

TEST_F(a_host, frees_whole_chunks_when_it_evicts_beside_a_shared_one) {
  add(5, scheduler::seconds{1e6}, 3 * heap_pool::chunk + 1000);
  add(7, scheduler::seconds{1e6}, 1000);
  add(9, scheduler::seconds{1e6}, 3 * heap_pool::chunk);
  start(4);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15) << "in the last chunk of the first";
  EXPECT_EQ(sum_of(ask(2, 1)), 19);
  EXPECT_EQ(host_->state(0), model_state::cold);
  EXPECT_EQ(host_->state(1), model_state::warm);
}

TEST_F(a_host, evicts_when_training_cannot_give_what_it_seemed_to_have) {
  add(5);
  add(7);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  pool_->fail_next(error_kind::out_of_memory);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(host_->state(0), model_state::cold);
}

TEST_F(a_host, does_not_evict_for_a_model_that_is_larger_than_the_pool) {
  add(5);
  controls_.push_back(std::make_shared<model_control>());
  served_model huge;
  huge.name = "huge";
  huge.model = std::make_unique<sum_model>(1000 * heap_pool::chunk, 1, controls_.back());
  huge.scheduling.goal.latency = scheduler::seconds{0.1};
  models_.push_back(std::move(huge));
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(failure_of(ask(1, 1)), error_kind::out_of_memory);
  EXPECT_EQ(host_->state(0), model_state::warm);
}

TEST_F(a_host, serves_two_models_in_turn_that_do_not_fit_together) {
  add(5);
  auto& other = add(7);
  start(3);
  other.close();
  send(1, 0, 0);
  ASSERT_TRUE(other.wait_for_runs(1));
  for (int i = 1; i < 7; ++i) {
    send(static_cast<std::size_t>(i % 2), i, i);
  }
  other.open();
  auto const got = answers_.wait_for(7);
  ASSERT_EQ(got.size(), 7U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), which + (which % 2 == 1 || which == 0 ? 14 : 10));
  }
}

TEST_F(a_host, loads_what_is_always_warm_before_a_request_and_never_lets_go_of_it) {
  auto& always = add(5, scheduler::seconds{0.0});
  models_[0].always_warm = true;
  auto& other = add(7, scheduler::seconds{0.0});
  start(3);  // room for one
  host_->warm_up();
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(failure_of(ask(1, 1)), error_kind::out_of_memory);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(always.loads(), 1);
  EXPECT_EQ(other.loads(), 0);
}

TEST_F(a_host, warms_up_without_what_cannot_be_loaded) {
  auto& control = add(5);
  models_[0].always_warm = true;
  control.fail_load(error_kind::internal);
  start(8);
  host_->warm_up();
  EXPECT_EQ(host_->state(0), model_state::cold);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(a_host, holds_compute_from_a_requests_arrival_until_none_is_left) {
  auto& control = add(5);
  options_.pause = pause_mode::on_request;
  options_.pause_hysteresis = 1ms;
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
  options_.min_share = 0.9;
  start(8);
  control.close();
  auto const before = std::chrono::steady_clock::now();
  send(0, 1);
  EXPECT_EQ(pool_->claims(), 1);
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

TEST_F(a_host, keeps_the_reserve_that_the_policy_names) {
  add(5);
  options_.reserve_bytes = heap_pool::chunk;
  options_.tick = 1ms;
  start(8);
  EXPECT_TRUE(pool_->wait_for_reserve(2 * heap_pool::chunk))
      << "between one and two reserves stay free";
}

TEST_F(a_host, turns_a_models_exceptions_into_errors_and_goes_on) {
  add(5);
  start(8);
  EXPECT_EQ(failure_of(ask(0, -1)), error_kind::invalid_argument);
  EXPECT_EQ(failure_of(ask(0, 1'000'000)), error_kind::internal);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.requests, 3U);
  EXPECT_EQ(seen.failed, 2U);
}

TEST_F(a_host, goes_on_when_taking_an_answer_throws) {
  add(5);
  start(8);
  infer_request request;
  request.inputs.push_back(number("input", 1));
  host_->submit(0, std::move(request),
                [](infer_result const&) { throw std::runtime_error{"gone"}; });
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_F(a_host, keeps_a_model_whose_memory_is_still_in_use) {
  auto& control = add(5, scheduler::seconds{0.001});
  add(7);
  start(3);
  control.fail_unload();
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  ASSERT_TRUE(control.wait_for_unloads(1));
  EXPECT_EQ(failure_of(ask(1, 1)), error_kind::out_of_memory) << "its memory was given away";
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
  EXPECT_EQ(pool_->usage().serving_bytes, model_bytes);
}

TEST_F(a_host, finishes_what_waits_before_it_stops) {
  auto& control = add(5);
  start(8);
  control.close();
  for (int i = 0; i < 4; ++i) {
    send(0, i, i);
  }
  ASSERT_TRUE(control.wait_for_runs(1));
  std::thread opener{[&] { control.open(); }};
  EXPECT_TRUE(host_->stop(patience));
  opener.join();
  auto const got = answers_.wait_for(4);
  ASSERT_EQ(got.size(), 4U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), which + 10);
  }
  EXPECT_EQ(pool_->usage().serving_bytes, 0U);
  send(0, 9, 9);
  auto const late = answers_.wait_for(5);
  ASSERT_EQ(late.size(), 5U);
  EXPECT_EQ(failure_of(late[4].second), error_kind::unavailable);
}

TEST_F(a_host, tells_when_a_computation_outlasts_the_grace) {
  auto& control = add(5);
  start(8);
  control.close();
  send(0, 1, 0);
  send(0, 2, 1);
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_FALSE(host_->stop(1ms));
  auto const refused = answers_.wait_for(1);
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_EQ(refused[0].first, 1);
  EXPECT_EQ(failure_of(refused[0].second), error_kind::unavailable);
  control.open();
  EXPECT_TRUE(host_->stop(patience));
}

TEST_F(a_host, answers_every_request_once_from_many_threads) {
  constexpr int threads = 4;
  constexpr int each = 200;
  add(5, scheduler::seconds{0.0});
  add(7, scheduler::seconds{0.0005});
  models_[0].max_queue = models_[1].max_queue = threads * each;
  options_.pause_hysteresis = 0ms;
  options_.tick = 1ms;
  start(5, 1);
  std::array<std::atomic<int>, threads * each> calls{};
  std::atomic<int> wrong = 0;
  std::mutex mutex;
  std::condition_variable all_came;
  int came = 0;
  std::vector<std::thread> senders;
  for (int thread = 0; thread < threads; ++thread) {
    senders.emplace_back([&, thread] {
      for (int i = 0; i < each; ++i) {
        infer_request request;
        request.inputs.push_back(number("input", i));
        auto const model = static_cast<std::size_t>(i % 2);
        host_->submit(model, std::move(request), [&, thread, i, model](infer_result const& result) {
          ++calls.at(static_cast<std::size_t>(thread * each + i));
          wrong += sum_of(result) == i + (model == 0 ? 10 : 14) ? 0 : 1;
          std::lock_guard const lock{mutex};
          ++came;
          all_came.notify_all();
        });
      }
    });
  }
  for (auto& sender : senders) {
    sender.join();
  }
  {
    std::unique_lock lock{mutex};
    EXPECT_TRUE(all_came.wait_for(lock, 2 * patience, [&] { return came == threads * each; }));
  }
  EXPECT_TRUE(host_->stop(patience));
  EXPECT_EQ(wrong, 0);
  for (auto const& count : calls) {
    EXPECT_EQ(count, 1);
  }
}

}  // namespace
}  // namespace sluice::server::testing
