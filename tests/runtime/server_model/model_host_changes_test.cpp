/// Models that come, go, and are promised other things while a host runs.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

class a_changing_host : public a_host, public ::testing::WithParamInterface<std::size_t> {
 protected:
  a_changing_host() { options_.computing_threads = GetParam(); }

  /// One that is not served yet.
  served_model make(unsigned char weight) {
    add(weight);
    auto made = std::move(models_.back());
    models_.pop_back();
    made.name = "new";
    return made;
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (auto const& each : host_->snapshot().models) {
      found.push_back(each.name);
    }
    return found;
  }
};

INSTANTIATE_TEST_SUITE_P(threads, a_changing_host, ::testing::Values(0U, 3U));

TEST_P(a_changing_host, serves_a_model_that_comes_later) {
  add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  host_->put(1, make(7));
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  EXPECT_EQ(names(), (std::vector<std::string>{"model0", "new"}));
}

TEST_P(a_changing_host, loads_a_model_that_is_always_warm_as_soon_as_it_comes) {
  add(5);
  start(8);
  auto made = make(7);
  made.always_warm = true;
  host_->put(1, std::move(made));
  while (host_->state(1) != model_state::warm) {
    std::this_thread::yield();
  }
}

TEST_P(a_changing_host, computes_the_samples_of_one_that_comes_first) {
  add(5);
  start(8);
  auto made = make(7);
  auto& control = *controls_.back();
  warmup_sample sample{.name = "first", .count = 2, .inputs = {}};
  sample.inputs.push_back(
      {.name = "input", .type = datatype::int64, .shape = {1}, .bytes = sizeof(std::int64_t)});
  made.warmup.push_back(std::move(sample));
  host_->put(1, std::move(made));
  EXPECT_TRUE(control.has_begun(2));
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
}

TEST_P(a_changing_host, answers_what_a_model_has_before_it_leaves) {
  auto& control = add(5);
  add(7);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  control.close();
  send(0, 2, 2);
  send(0, 3, 3);
  ASSERT_TRUE(control.wait_for_runs(2));
  host_->retire(0);
  send(0, 4, 4);
  auto got = answers_.wait_for(2);
  EXPECT_EQ(failure_of(got.at(1).second), error_kind::unavailable);
  EXPECT_EQ(names(), (std::vector<std::string>{"model1"}));
  control.open();
  got = answers_.wait_for(4);
  ASSERT_EQ(got.size(), 4U);
  EXPECT_EQ(sum_of(got[2].second), 12);
  EXPECT_EQ(sum_of(got[3].second), 13);
  ASSERT_TRUE(control.wait_for_unloads(1));
  while (pool_->usage().serving_bytes > 0) {
    std::this_thread::yield();
  }
  asked_ = 4;
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
}

TEST_P(a_changing_host, gives_the_place_of_one_that_has_left_to_another) {
  auto& control = add(5);
  start(8);
  control.close();
  send(0, 1, 1);
  ASSERT_TRUE(control.wait_for_runs(1));
  host_->retire(0);
  std::atomic<bool> is_there{false};
  std::thread puts{[&] {
    host_->put(0, make(7));
    is_there = true;
  }};
  EXPECT_FALSE(is_there) << "the one before has a request";
  control.open();
  puts.join();
  asked_ = 1;
  EXPECT_EQ(sum_of(ask(0, 1)), 15);
  EXPECT_EQ(names(), std::vector<std::string>{"new"});
}

TEST_P(a_changing_host, promises_something_else_for_a_model_that_stays_warm) {
  auto& control = add(5);
  start(8);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  served_model to;
  to.scheduling.goal.latency = scheduler::seconds{0.25};
  to.scheduling.limits = {scheduler::seconds{1e6}, scheduler::seconds{1e6}};
  to.max_queue = 1;
  host_->revise(0, std::move(to));
  EXPECT_EQ(host_->snapshot().models.at(0).goal.latency, scheduler::seconds{0.25});
  control.close();
  send(0, 1, 1);
  ASSERT_TRUE(control.wait_for_runs(2));
  send(0, 2, 2);
  EXPECT_EQ(failure_of(answers_.wait_for(2).at(1).second), error_kind::unavailable)
      << "its queue is full";
  control.open();
  EXPECT_EQ(answers_.wait_for(3).size(), 3U);
  EXPECT_EQ(control.loads(), 1);
}

TEST_P(a_changing_host, refuses_what_cannot_be_promised_and_goes_on) {
  add(5);
  start(8);
  served_model to;
  EXPECT_THROW(host_->revise(0, std::move(to)), error);
  auto made = make(7);
  made.scheduling.goal.latency = scheduler::seconds{0.0};
  EXPECT_THROW(host_->put(1, std::move(made)), error);
  EXPECT_THROW(host_->put(3, make(7)), error);
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
}

TEST_P(a_changing_host, has_places_where_nothing_is_served) {
  add(5);
  models_.insert(models_.begin(), served_model{});
  start(8);
  send(0, 1, 1);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::unavailable);
  asked_ = 1;
  EXPECT_EQ(sum_of(ask(1, 1)), 11);
  EXPECT_EQ(names(), std::vector<std::string>{"model0"});
  host_->put(0, make(7));
  EXPECT_EQ(sum_of(ask(0, 1)), 15);
}

}  // namespace
}  // namespace sluice::server::testing
