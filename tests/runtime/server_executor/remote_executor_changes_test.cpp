#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "tests/runtime/server_executor/a_remote_executor.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::size_t behind = 3;

class a_changing_executor : public a_remote_executor {
 protected:
  /// By kinds of models, with their names; null: the model before is retired.
  [[nodiscard]] remote_executor::orders orders_for(nlohmann::json const& kinds) {
    remote_executor::orders made{.settings = {{"models", kinds}}, .policy = "", .models = {}};
    for (std::size_t place = 0; place < kinds.size(); ++place) {
      bool const is_retired = kinds[place].is_null();
      made.models.push_back({is_retired ? names_.at(place) : kinds[place].get<std::string>(), "1"});
      made.models.back().is_retired = is_retired;
      names_.resize(std::max(names_.size(), place + 1));
      names_[place] = made.models.back().name;
    }
    return made;
  }
  void change(nlohmann::json const& kinds) { ASSERT_TRUE(executor_->change(orders_for(kinds))); }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    auto const status = executor_->status();
    for (auto const& each : status["models"]) {
      found.push_back(each["name"]);
    }
    return found;
  }

  std::vector<std::string> names_{"sum", "rogue", "other"};
};

TEST_F(a_changing_executor, serves_a_model_that_comes_later) {
  start();
  EXPECT_EQ(sum_of(ask(sum, 1)), 11);
  change({"sum", "rogue", "other", "late"});
  EXPECT_EQ(sum_of(ask(behind, 9)), 9);
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
  EXPECT_EQ(process()["started"], 1);
  EXPECT_EQ(names(), (std::vector<std::string>{"sum", "rogue", "other", "late"}));
}

TEST_F(a_changing_executor, answers_while_a_change_waits_for_a_computation) {
  options_.first.settings["computing_threads"] = 3;
  start();
  auto const hung = send(mischief::hang, 1);
  change({"sum", nullptr, "other"});
  std::thread changes{[&] {
    EXPECT_FALSE(executor_->change(orders_for({"sum", "late", "other"})));
  }};
  EXPECT_EQ(sum_of(ask(sum, 1)), 11);
  EXPECT_FALSE(executor_->is_free(rogue));
  executor_->cancel(hung);
  EXPECT_FALSE(executor_->stop(0ms));
  changes.join();
}

TEST_F(a_changing_executor, refuses_what_is_retired_and_gives_its_place_to_another) {
  start();
  EXPECT_EQ(sum_of(ask(other, 9)), 9);
  change({"sum", "rogue", nullptr});
  auto const refused = ask(other, 9);
  EXPECT_EQ(failure_of(refused), error_kind::unavailable);
  EXPECT_THAT(std::get<error>(refused).what(), HasSubstr("'other' is not served any more"));
  EXPECT_EQ(names(), (std::vector<std::string>{"sum", "rogue"}));
  ASSERT_TRUE(executor_->is_free(other));
  change({"sum", "rogue", "late"});
  EXPECT_EQ(sum_of(ask(other, 9)), 9);
  auto const seen = executor_->status()["models"][other];
  EXPECT_EQ(seen["name"], "late");
  EXPECT_EQ(seen["requests"], 1) << "of its own";
}

TEST_F(a_changing_executor, serves_the_same_when_its_process_is_replaced) {
  start();
  change({nullptr, "rogue", "other", "sum"});
  send(mischief::abort, 0);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::aborted);
  EXPECT_EQ(sum_of(ask(behind, 2)), 12);
  EXPECT_EQ(failure_of(ask(sum, 1)), error_kind::unavailable);
  EXPECT_EQ(process()["started"], 2);
}

TEST_F(a_changing_executor, is_changed_while_it_has_no_process) {
  start();
  auto const pid = process()["pid"].get<pid_t>();
  stop_process(pid);
  std::thread changes{[&] { change({"sum", "rogue", "other", "late"}); }};
  ::kill(pid, SIGKILL);
  changes.join();
  EXPECT_EQ(sum_of(ask(behind, 9)), 9);
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
}

TEST_F(a_changing_executor, leaves_a_model_out_that_ends_its_process_when_it_is_read) {
  start();
  EXPECT_EQ(sum_of(ask(sum, 1)), 11);
  change({"sum", "rogue", "other", "crash"});
  EXPECT_EQ(process()["started"], 2);
  ASSERT_TRUE(executor_->unservable(behind));
  EXPECT_EQ(failure_of(ask(behind, 1)), error_kind::unavailable);
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
  change({"sum", "rogue", "other", nullptr});
  change({"sum", "rogue", "other", "late"});
  EXPECT_FALSE(executor_->unservable(behind));
  EXPECT_EQ(sum_of(ask(behind, 9)), 9);
  EXPECT_EQ(process()["started"], 2);
}

TEST_F(a_changing_executor, starts_without_a_model_that_ends_its_process_when_it_is_read) {
  options_.first = orders_for({"sum", "crash", "other"});
  start();
  EXPECT_EQ(sum_of(ask(sum, 1)), 11);
  ASSERT_TRUE(executor_->unservable(rogue));
  EXPECT_EQ(process()["started"], 2);
}

TEST_F(a_changing_executor, answers_everybody_while_models_come_and_go) {
  options_.first.settings["computing_threads"] = 3;
  start();
  std::atomic<bool> ends{false};
  std::thread asks{[&] {
    answers own;
    for (std::size_t asked = 0; !ends; ++asked) {
      infer_request request;
      request.inputs.push_back(number("input", 3));
      executor_->submit(sum, std::move(request), own.take(0));
      auto const got = own.wait_for(asked + 1);
      ASSERT_EQ(got.size(), asked + 1);
      ASSERT_EQ(sum_of(got.back().second), 13);
    }
  }};
  for (int i = 0; i < 20; ++i) {
    change({"sum", "rogue", "other", "late"});
    EXPECT_EQ(sum_of(ask(behind, 9)), 9);
    change({"sum", "rogue", "other", nullptr});
  }
  ends = true;
  asks.join();
  EXPECT_EQ(process()["started"], 1);
}

}  // namespace
}  // namespace sluice::server::testing
