#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

TEST_F(a_host, says_at_once_when_a_computation_has_left_the_device_useless) {
  auto& control = add(5);
  std::atomic<int> said{0};
  options_.board = std::make_shared<host_board>();
  options_.device_failed = [&](error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument);
    auto const seen = options_.board->actions();
    EXPECT_EQ(seen.size(), 1U) << "whose computation it was can be read when the process has ended";
    EXPECT_TRUE(!seen.empty() && seen[0].what == activity::computing && seen[0].model == 0);
    ++said;
  };
  start(8);
  EXPECT_EQ(failure_of(ask(0, -1)), error_kind::invalid_argument);
  EXPECT_EQ(said, 0) << "it is the request that failed";
  control.break_device();
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(said, 0) << "nothing has failed";
  EXPECT_EQ(failure_of(ask(0, -1)), error_kind::invalid_argument);
  EXPECT_EQ(said, 1);
}

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

TEST_F(a_host, answers_a_request_when_its_time_is_over_although_it_is_being_computed) {
  auto& control = add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  control.close();
  send(0, 0, 0, 1s);
  ASSERT_TRUE(control.wait_for_runs(2));
  auto const got = answers_.wait_for(2);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(failure_of(got[1].second), error_kind::deadline_exceeded);
  control.open();
  asked_ = 2;
  EXPECT_EQ(sum_of(ask(0, 3)), 13);
  EXPECT_EQ(answers_.wait_for(3).size(), 3U) << "what came too late was answered once more";
  EXPECT_EQ(host_->snapshot().failed, 1U);
  EXPECT_EQ(host_->snapshot().in_flight, 0U);
}

TEST_F(a_host, counts_a_requests_time_from_when_it_came) {
  add(5);
  start(8);
  infer_request request;
  request.inputs.push_back(number("input", 1));
  request.timeout = 1min;
  request.arrival = std::chrono::steady_clock::now() - 2min;
  host_->submit(0, std::move(request), answers_.take(0));
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::deadline_exceeded);
}

TEST_F(a_host, does_not_compute_for_a_client_that_has_left) {
  auto& control = add(5);
  models_[0].max_queue = 3;
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  auto const left = send(0, 1, 1);
  auto const stays = send(0, 2, 2);
  EXPECT_NE(left, stays);
  host_->cancel(left);
  host_->cancel(left);  // once more has no effect
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(got[0].first, 1);
  EXPECT_EQ(failure_of(got[0].second), error_kind::cancelled);
  send(0, 3, 3);  // there is room in the queue again
  control.open();
  auto const all = answers_.wait_for(4);
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(sum_of(all[1].second), 10);
  EXPECT_EQ(sum_of(all[2].second), 12);
  EXPECT_EQ(sum_of(all[3].second), 13);
  EXPECT_FALSE(control.has_begun(4)) << "what nobody waits for was computed";
  auto const seen = host_->snapshot();
  EXPECT_EQ(seen.models[0].cancelled, 1U);
  EXPECT_EQ(seen.models[0].failed, 1U);
}

TEST_F(a_host, drops_what_is_being_computed_for_a_client_that_leaves) {
  auto& control = add(5);
  start(8);
  control.close();
  auto const left = send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  host_->cancel(left);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::cancelled);
  control.open();
  asked_ = 1;
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  host_->cancel(left);  // it has been answered long ago
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
  start_with_one_tick(5);  // room for two
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);  // the other one is now the longest idle
  EXPECT_EQ(sum_of(ask(2, 1)), 19);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(host_->state(1), model_state::cold);
  EXPECT_EQ(host_->state(2), model_state::warm);
}

TEST_F(a_host, evicts_the_model_whose_absence_costs_least) {
  add(5);
  add(6);
  add(7);
  start(4);
  for (int i = 0; i < 40; ++i) {
    ASSERT_EQ(sum_of(ask(0, 1)), 11);
  }
  ASSERT_EQ(sum_of(ask(1, 1)), 13);
  ASSERT_EQ(sum_of(ask(2, 1)), 15);
  EXPECT_EQ(host_->state(0), model_state::warm) << "it is the longest idle, and asked for the most";
  EXPECT_EQ(host_->state(1), model_state::cold);
}

TEST_F(a_host, evicts_one_large_model_where_several_small_ones_would_have_to_go) {
  add(5, scheduler::seconds{1e6}, heap_pool::chunk);
  add(6, scheduler::seconds{1e6}, heap_pool::chunk);
  add(7, scheduler::seconds{1e6}, 3 * heap_pool::chunk);
  add(8, scheduler::seconds{1e6}, 3 * heap_pool::chunk);
  start_with_one_tick(5);
  for (std::size_t model = 0; model < 3; ++model) {
    ASSERT_GT(sum_of(ask(model, 1)), 0);
  }
  ASSERT_GT(sum_of(ask(3, 1)), 0);
  EXPECT_EQ(host_->state(0), model_state::warm);
  EXPECT_EQ(host_->state(1), model_state::warm);
  EXPECT_EQ(host_->state(2), model_state::cold);
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

TEST_F(a_host, does_not_evict_for_a_model_that_is_larger_than_what_training_leaves) {
  add(5);
  add(7, scheduler::seconds{1e6}, 5 * heap_pool::chunk);
  start(8, 4);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  pool_->keep(4);
  pool_->fail_next(error_kind::out_of_memory);
  EXPECT_EQ(failure_of(ask(1, 1)), error_kind::out_of_memory);
  EXPECT_EQ(host_->state(0), model_state::warm);
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

TEST_F(a_host, counts_a_request_that_is_sent_again_after_a_refusal_once) {
  auto& model = add(5);
  models_.back().max_queue = 1;
  options_.tick = std::chrono::milliseconds{5};
  start(8);
  model.close();
  send(0, 1, 1);
  ASSERT_TRUE(model.wait_for_runs(1));
  send(0, 1, 2);  // refused, as those that follow
  send(0, 1, 2);
  send(0, 1, 2);
  send(0, 1, 3);
  ASSERT_EQ(answers_.wait_for(4).size(), 4U);
  auto const seen = [this] { return host_->snapshot().models[0].report; };
  while (seen().arrivals < 3 || seen().observed_requests < 2) {
    std::this_thread::yield();
  }
  EXPECT_EQ(seen().arrivals, 3U);
  EXPECT_EQ(seen().observed_requests, 2U);
  host_->note_refused(0, scheduler::retries::mark_of("3"), std::chrono::milliseconds{1});
  host_->note_refused(0, scheduler::retries::mark_of("4"), std::chrono::milliseconds{1});
  while (seen().arrivals < 4) {
    std::this_thread::yield();
  }
  EXPECT_EQ(seen().arrivals, 4U);
}

}  // namespace
}  // namespace sluice::server::testing
