/// Models that compute beside each other.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

class a_parallel_host : public a_host {
 protected:
  a_parallel_host() { options_.computing_threads = 3; }
};

TEST_F(a_parallel_host, answers_a_model_while_another_computes) {
  auto& control = add(5);
  add(7);
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  send(1, 1, 1);
  send(1, 2, 2);
  auto const got = answers_.wait_for(2);
  ASSERT_EQ(got.size(), 2U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), 14 + which);
  }
  control.open();
  EXPECT_EQ(sum_of(answers_.wait_for(3).at(2).second), 10);
}

TEST_F(a_parallel_host, computes_one_request_of_a_model_at_a_time) {
  auto& control = add(5);
  start(8);
  control.close();
  for (int i = 0; i < 5; ++i) {
    send(0, i, i);
  }
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_EQ(host_->snapshot().in_flight, 5U);
  EXPECT_FALSE(control.has_begun(2));
  control.open();
  auto const got = answers_.wait_for(5);
  ASSERT_EQ(got.size(), 5U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), 10 + which);
  }
}

TEST_F(a_parallel_host, computes_as_many_requests_of_a_model_at_once_as_it_allows) {
  auto& control = add(5);
  control.allow_at_once(2);
  start(8);
  control.close();
  for (int i = 0; i < 5; ++i) {
    send(0, i, i);
  }
  ASSERT_TRUE(control.wait_for_runs(2));
  EXPECT_FALSE(control.has_begun(3));
  control.open();
  auto const got = answers_.wait_for(5);
  ASSERT_EQ(got.size(), 5U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), 10 + which);
  }
}

TEST_F(a_parallel_host, computes_one_at_a_time_where_answers_keep_their_order) {
  auto& control = add(5);
  control.allow_at_once(2);
  models_.back().batching.preserve_ordering = true;
  add(7);
  start(8);
  control.close();
  send(0, 0, 0);
  send(0, 1, 1);
  ASSERT_TRUE(control.wait_for_runs(1));
  send(1, 2, 2);  // a thread is free
  EXPECT_EQ(sum_of(answers_.wait_for(1).at(0).second), 16);
  EXPECT_FALSE(control.has_begun(2));
  control.open();
  EXPECT_EQ(answers_.wait_for(3).size(), 3U);
}

TEST_F(a_parallel_host, lets_a_model_that_has_not_computed_for_a_while_rest) {
  options_.activations_kept = 0ms;
  options_.tick = 1ms;
  auto& control = add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_TRUE(control.wait_for_rests(1));
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
}

TEST_F(a_parallel_host, does_not_wait_for_a_computation_that_may_never_end) {
  auto& control = add(5);
  auto& hung = add(7);
  start(8);
  std::size_t asked = 0;
  auto const compute = [&](std::chrono::microseconds takes) {
    control.close();
    send(0, 1);
    ASSERT_TRUE(control.wait_for_runs(static_cast<int>(++asked)));
    for (auto const end = std::chrono::steady_clock::now() + takes;
         std::chrono::steady_clock::now() < end;) {
    }
    control.open();
    ASSERT_EQ(answers_.wait_for(asked).size(), asked);
  };
  constexpr int enough = 40;
  for (int i = 0; i < enough; ++i) {
    compute(0us);
  }
  hung.close();
  send(1, 0, 1);
  ASSERT_TRUE(hung.wait_for_runs(1));
  for (int i = 0; i < enough; ++i) {  // as if the other one took all that there is
    compute(5ms);
  }
  EXPECT_EQ(answers_.wait_for(asked).size(), asked);
  hung.open();
  EXPECT_EQ(answers_.wait_for(asked + 1).size(), asked + 1);
}

TEST_F(a_parallel_host, begins_nothing_beside_a_suspect) {
  auto& first = add(5);
  auto& second = add(7);
  auto& third = add(9);
  start(8);
  for (std::size_t model = 0; model < 3; ++model) {
    (void)ask(model, 0);
  }
  first.close();
  send(0, 0, 1);
  ASSERT_TRUE(first.wait_for_runs(2));
  infer_request suspect;
  suspect.model = "model1";
  suspect.inputs.push_back(number("input", 1));
  suspect.is_suspect = true;
  second.close();
  host_->submit(1, std::move(suspect), answers_.take(2));
  send(2, 2, 3);
  EXPECT_FALSE(second.has_begun(2)) << "the first one computes";
  first.open();
  ASSERT_TRUE(second.wait_for_runs(2));
  send(0, 3, 4);
  EXPECT_FALSE(first.has_begun(3));
  EXPECT_FALSE(third.has_begun(2));
  EXPECT_EQ(answers_.wait_for(4).at(3).first, 1);
  EXPECT_EQ(answers_.wait_for(0).size(), 4U);
  second.open();
  EXPECT_EQ(answers_.wait_for(7).size(), 7U);
}

class a_caller_of_a_parallel_host : public a_parallel_host {
 protected:
  void bring(std::size_t model, std::int64_t value, std::atomic<std::thread::id>& by) {
    infer_request request;
    request.inputs.push_back(number("input", value));
    host_->bring(model, std::move(request), [&by, done = answers_.take(0)](infer_result result) {
      by = std::this_thread::get_id();
      done(std::move(result));
    });
  }
};

TEST_F(a_caller_of_a_parallel_host, computes_what_is_known_to_take_little_time) {
  add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  std::atomic<std::thread::id> by;
  // A thread that has not been prepared wakes somebody who computes.
  bring(0, 2, by);
  EXPECT_FALSE(host_->compute_here());
  EXPECT_EQ(sum_of(answers_.wait_for(2).at(1).second), 12);
  EXPECT_NE(by.load(), std::this_thread::get_id());
  host_->prepare_to_compute();
  bring(0, 3, by);
  bring(0, 4, by);
  int computed = 0;
  while (host_->compute_here()) {
    ++computed;
  }
  auto const got = answers_.wait_for(4);
  ASSERT_EQ(got.size(), 4U);
  EXPECT_EQ(sum_of(got[2].second), 13);
  EXPECT_EQ(sum_of(got[3].second), 14);
  if (computed == 2) {  // no computation has taken long, by accident
    EXPECT_EQ(by.load(), std::this_thread::get_id());
  }
  EXPECT_FALSE(host_->compute_here());
  host_board::this_lane = host_board::no_lane;
}

TEST_F(a_caller_of_a_parallel_host, leaves_all_to_others_if_it_may_not_compute) {
  options_.callers_compute = false;
  add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  host_->prepare_to_compute();
  EXPECT_EQ(host_board::this_lane, host_board::no_lane);
  std::atomic<std::thread::id> by;
  bring(0, 2, by);
  EXPECT_FALSE(host_->compute_here());
  EXPECT_EQ(sum_of(answers_.wait_for(2).at(1).second), 12);
  EXPECT_NE(by.load(), std::this_thread::get_id());
}

TEST_F(a_caller_of_a_parallel_host, leaves_to_others_what_is_not_known_to) {
  add(5);
  auto& second = add(7);
  start(8);
  host_->prepare_to_compute();
  std::atomic<std::thread::id> by;
  bring(0, 1, by);  // it is cold
  while (host_->compute_here()) {
  }
  EXPECT_EQ(sum_of(answers_.wait_for(1).at(0).second), 11);
  EXPECT_NE(by.load(), std::this_thread::get_id());
  second.close();
  bring(1, 1, by);  // and so is this one; it takes long
  EXPECT_FALSE(host_->compute_here());
  ASSERT_TRUE(second.wait_for_runs(1));
  bring(1, 2, by);  // it is being computed
  EXPECT_FALSE(host_->compute_here());
  bring(0, 3, by);
  while (host_->compute_here()) {
  }
  EXPECT_EQ(sum_of(answers_.wait_for(2).at(1).second), 13);
  second.open();
  EXPECT_EQ(answers_.wait_for(4).size(), 4U);
  host_board::this_lane = host_board::no_lane;
}

TEST_F(a_parallel_host, loads_a_model_while_another_computes) {
  auto& control = add(5);
  add(7);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  control.close();
  send(0, 0, 9);
  ASSERT_TRUE(control.wait_for_runs(2));
  send(1, 1, 10);
  EXPECT_EQ(sum_of(answers_.wait_for(2).at(1).second), 15);
  control.open();
  EXPECT_EQ(answers_.wait_for(3).size(), 3U);
}

TEST_F(a_parallel_host, releases_a_model_that_computes_only_when_it_has_done) {
  auto& control = add(5);
  add(7);
  start(3);  // room for one of them
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  control.close();
  send(0, 0, 3);
  ASSERT_TRUE(control.wait_for_runs(2));
  send(1, 1, 4);
  while (host_->state(1) != model_state::loading) {
    std::this_thread::yield();
  }
  EXPECT_EQ(host_->state(0), model_state::warm);
  control.open();
  auto const got = answers_.wait_for(3);
  ASSERT_EQ(got.size(), 3U);
  for (auto const& [which, result] : got) {
    EXPECT_EQ(sum_of(result), which == 0 ? 11 : which == 3 ? 10 : 15);
  }
  EXPECT_EQ(host_->state(0), model_state::cold);
}

TEST_F(a_parallel_host, fails_a_load_whose_memory_does_not_come_free_in_time) {
  auto& control = add(5);
  add(7);
  start(3);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(2));
  send(1, 1, 1, 50ms);
  EXPECT_TRUE(failure_of(answers_.wait_for(2).at(1).second).has_value());
  control.open();
  EXPECT_EQ(sum_of(answers_.wait_for(3).at(2).second), 10);
}

TEST_F(a_parallel_host, holds_compute_until_the_last_has_done) {
  auto& first = add(5);
  auto& second = add(7);
  options_.pause_hysteresis = 0ms;
  start(8);
  first.close();
  second.close();
  send(0, 0, 0);
  send(1, 0, 1);
  ASSERT_TRUE(first.wait_for_runs(1));
  ASSERT_TRUE(second.wait_for_runs(1));
  first.open();
  EXPECT_EQ(answers_.wait_for(1).size(), 1U);
  EXPECT_EQ(pool_->claims(), 1);
  second.open();
  EXPECT_EQ(answers_.wait_for(2).size(), 2U);
  EXPECT_TRUE(pool_->wait_for_claims(0));
}

TEST_F(a_parallel_host, ends_with_what_it_computes) {
  auto& control = add(5);
  add(7);
  start(8);
  control.close();
  send(0, 0, 0);
  ASSERT_TRUE(control.wait_for_runs(1));
  EXPECT_FALSE(host_->stop(0ms));
  send(1, 0, 1);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::unavailable);
  control.open();
  EXPECT_TRUE(host_->stop(patience));
  EXPECT_EQ(sum_of(answers_.wait_for(2).at(1).second), 10);
}

TEST_F(a_parallel_host, answers_everybody_rightly_while_models_come_and_go) {
  constexpr int models = 5, clients = 4, each = 200;
  for (int i = 0; i < models; ++i) {
    add(static_cast<unsigned char>(i + 1), scheduler::seconds{i % 2 == 0 ? 0.001 : 1e6});
  }
  start(7);  // room for three of them
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int client = 0; client < clients; ++client) {
    threads.emplace_back([&, client] {
      std::minstd_rand chance{static_cast<unsigned>(client + 1)};
      for (int i = 0; i < each; ++i) {
        auto const model = chance() % models;
        answers own;
        infer_request request;
        request.inputs.push_back(number("input", i));
        auto const ticket = host_->submit(model, std::move(request), own.take(0));
        bool const leaves = chance() % 8 == 0;
        if (leaves) {
          host_->cancel(ticket);
        }
        auto const got = own.wait_for(1);
        bool const right =
            got.size() == 1 && (sum_of(got[0].second) == i + 2 * static_cast<int>(model + 1) ||
                                (leaves && failure_of(got[0].second) == error_kind::cancelled));
        wrong += right ? 0 : 1;
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(host_->snapshot().in_flight, 0U);
}

}  // namespace
}  // namespace sluice::server::testing
