#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <thread>

#include "scheduler/admission.hpp"
#include "tests/runtime/server_executor/a_remote_executor.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST_F(a_remote_executor, answers_and_ends_in_order) {
  start();
  EXPECT_TRUE(executor_->ready());
  EXPECT_EQ(executor_->state(sum), model_state::cold);
  EXPECT_EQ(sum_of(ask(sum, 3)), 13);
  EXPECT_EQ(executor_->state(sum), model_state::warm);
  auto const status = executor_->status();
  EXPECT_EQ(status["models"][0]["state"], "warm");
  EXPECT_EQ(status["models"][0]["cold_starts"], 1);
  EXPECT_EQ(status["requests"]["total"], 1);
  EXPECT_EQ(status["executor"]["state"], "ready");
  EXPECT_EQ(status["executor"]["started"], 1);
  for (auto const& count : status["executor"]["ended"]) {
    EXPECT_EQ(count, 0);
  }
  EXPECT_TRUE(executor_->stop(patience));
  EXPECT_TRUE(executor_->stop(patience)) << "again";
  EXPECT_EQ(failure_of(ask(sum, 3)), error_kind::unavailable);
}

TEST_F(a_remote_executor, refuses_what_its_process_cannot_serve_and_goes_on_with_the_rest) {
  std::string const why(100'000, 'x');  // more than a message holds
  options_.first.settings["unservable"] = {
      {{"place", other}, {"kind", static_cast<int>(error_kind::invalid_argument)}, {"error", why}},
      {{"place", 77}},
      "no such thing"};
  start();
  EXPECT_TRUE(executor_->ready());
  EXPECT_EQ(sum_of(ask(sum, 3)), 13);
  auto const refused = ask(other, 0);
  EXPECT_EQ(failure_of(refused), error_kind::unavailable);
  EXPECT_EQ(std::get<error>(refused).what(), "model 'other' cannot be served: " + why);
  EXPECT_FALSE(executor_->unservable(sum));
  ASSERT_TRUE(executor_->unservable(other));
  EXPECT_EQ(executor_->unservable(other)->kind(), error_kind::invalid_argument);
  EXPECT_EQ(executor_->model_ready(other).reason, why);
  auto const status = executor_->status();
  EXPECT_TRUE(status["models"][0]["unservable"].is_null());
  EXPECT_EQ(status["models"][2]["state"], "failed");
  EXPECT_EQ(status["models"][2]["unservable"], why);
}

TEST_F(a_remote_executor, keeps_the_ids_that_clients_chose) {
  start();
  send(sum, 1, 77);
  EXPECT_EQ(std::get<infer_response>(answers_.wait_for(1).at(0).second).id, "77");
}

/// What a batch does to its process.
class a_batch_of_a_remote_executor : public a_remote_executor,
                                     public ::testing::WithParamInterface<mischief> {};

INSTANTIATE_TEST_SUITE_P(, a_batch_of_a_remote_executor,
                         ::testing::Values(mischief::abort, mischief::exit,
                                           mischief::end_without_a_word),
                         [](auto const& each) {
                           return each.param == mischief::abort  ? "by_a_signal"
                                  : each.param == mischief::exit ? "by_exit"
                                                                 : "without_a_word";
                         });

TEST_P(a_batch_of_a_remote_executor, that_ends_its_process_fails_only_who_is_guilty) {
  options_.first.settings["batch"] = 3;
  options_.first.settings["computing_threads"] = 2;
  start();
  send(rogue, 7, 0);
  send(GetParam(), 1);
  send(rogue, 8, 2);
  auto got = answers_.wait_for(3);
  ASSERT_EQ(got.size(), 3U);
  std::sort(got.begin(), got.end(), [](auto const& a, auto const& b) { return a.first < b.first; });
  EXPECT_EQ(sum_of(got[0].second), 7);
  EXPECT_EQ(failure_of(got[1].second), error_kind::aborted);
  EXPECT_EQ(sum_of(got[2].second), 8);
  EXPECT_EQ(process()["started"], 3) << "together, the guilty one alone, and then nobody";
}

TEST_F(a_remote_executor, whose_batch_hangs_lets_nobody_wait_longer_than_its_time) {
  options_.first.settings["batch"] = 2;
  options_.compute_limit = 300ms;
  start();
  send(rogue, 7, 0, 300ms);
  send(mischief::hang, 1, 300ms);
  auto const got = answers_.wait_for(2);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(failure_of(got[0].second), error_kind::deadline_exceeded);
  EXPECT_EQ(failure_of(got[1].second), error_kind::deadline_exceeded);
  EXPECT_EQ(sum_of(ask(sum, 3)), 13);
}

TEST_F(a_remote_executor, brings_large_answers_and_long_errors) {
  start();
  auto const large = std::get<infer_response>(ask(mischief::large));
  EXPECT_EQ(large.outputs.at(0).data, std::vector<std::byte>(large_answer, std::byte{7}));
  EXPECT_EQ(failure_of(ask(mischief::raise)), error_kind::invalid_argument);
  infer_request request;
  request.inputs.push_back(number("input", 1));
  request.inputs.push_back(
      {"rest", datatype::uint8, {large_answer}, std::vector<std::byte>(large_answer)});
  executor_->submit(sum, std::move(request), answers_.take(9));
  EXPECT_EQ(sum_of(answers_.wait_for(3).at(2).second), 11);
}

TEST_F(a_remote_executor, is_replaced_when_a_model_ends_it_and_the_others_requests_are_answered) {
  start();
  send(mischief::abort, 0);
  for (int i = 1; i < 5; ++i) {
    send(sum, i, i);
  }
  auto const got = answers_.wait_for(5);
  ASSERT_EQ(got.size(), 5U);
  for (auto const& [which, result] : got) {
    if (which == 0) {
      ASSERT_EQ(failure_of(result), error_kind::aborted);
      EXPECT_THAT(std::get<error>(result).what(),
                  HasSubstr("signal 6 while it computed model 'rogue'"));
    } else {
      EXPECT_EQ(sum_of(result), 10 + which);
    }
  }
  EXPECT_EQ(process()["started"], 2);
  EXPECT_EQ(executor_->status()["models"][rogue]["ended_executors"], 1);
  EXPECT_EQ(executor_->status()["models"][sum]["ended_executors"], 0);
}

TEST_F(a_remote_executor, says_how_its_process_ended) {
  start();
  auto const result = ask(mischief::exit);
  ASSERT_EQ(failure_of(result), error_kind::aborted);
  EXPECT_THAT(std::get<error>(result).what(), HasSubstr("ended with exit code 42"));
  EXPECT_EQ(process()["ended"]["model"], 1);
  EXPECT_EQ(process()["ended"]["killed"], 0);
}

TEST_F(a_remote_executor, whose_models_compute_beside_each_other_blames_the_one_that_ended_it) {
  options_.first.settings["computing_threads"] = 3;
  for (auto const what : {mischief::abort, mischief::exit}) {
    executor_.reset();
    start();
    auto const before = answers_.wait_for(0).size();
    send(other, static_cast<std::int64_t>(mischief::hang), 1);
    send(what, 0);
    send(sum, 2, 2);
    auto const got = answers_.wait_for(before + 2);
    ASSERT_EQ(got.size(), before + 2);
    for (std::size_t i = before; i < got.size(); ++i) {
      if (got[i].first == 0) {
        EXPECT_EQ(failure_of(got[i].second), error_kind::aborted);
      } else {
        EXPECT_EQ(sum_of(got[i].second), 12);
      }
    }
    EXPECT_EQ(executor_->status()["models"][rogue]["ended_executors"], 1);
    EXPECT_EQ(executor_->status()["models"][other]["ended_executors"], 0);
  }
}

TEST_F(a_remote_executor, that_cannot_say_who_ended_it_tries_each_once_more) {
  options_.first.settings["computing_threads"] = 3;
  start();
  for (auto const what : {mischief::end_without_a_word, mischief::break_device}) {
    executor_.reset();
    start();
    auto const before = answers_.wait_for(0).size();
    send(other, static_cast<std::int64_t>(mischief::hang_in_the_first_process), 1);
    send(what, 0);
    send(sum, 2, 2);
    auto const got = answers_.wait_for(before + 3);
    ASSERT_EQ(got.size(), before + 3);
    for (std::size_t i = before; i < got.size(); ++i) {
      if (got[i].first == 0) {
        EXPECT_EQ(failure_of(got[i].second), error_kind::aborted);
      } else {
        EXPECT_TRUE(std::holds_alternative<infer_response>(got[i].second));
      }
    }
    EXPECT_GE(process()["started"].get<int>(), 2);
    EXPECT_EQ(executor_->status()["models"][rogue]["ended_executors"], 1);
    EXPECT_EQ(executor_->status()["models"][other]["ended_executors"], 0);
  }
}

TEST_F(a_remote_executor, ends_a_computation_that_takes_too_long) {
  options_.compute_limit = 300ms;
  start();
  EXPECT_EQ(sum_of(ask(sum, 1)), 11);
  send(mischief::hang, 1);
  send(sum, 2, 2);
  auto const got = answers_.wait_for(3);
  ASSERT_EQ(got.size(), 3U);
  EXPECT_EQ(failure_of(got[1].second), error_kind::deadline_exceeded);
  EXPECT_THAT(std::get<error>(got[1].second).what(), HasSubstr("took longer than 300 ms"));
  EXPECT_EQ(sum_of(got[2].second), 12);
  EXPECT_EQ(process()["ended"]["hang"], 1);
  EXPECT_EQ(process()["ended"]["silence"], 0);
}

TEST_F(a_remote_executor, answers_at_a_requests_time_while_another_hangs) {
  start();
  send(mischief::hang, 0);
  send(sum, 1, 1, 100ms);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::deadline_exceeded);
  EXPECT_EQ(process()["started"], 1);
}

TEST_F(a_remote_executor, answers_at_a_requests_time_although_its_process_is_stopped) {
  start();
  pid_t const pid = process()["pid"];
  stop_process(pid);
  send(sum, 1, 0, 50ms);
  auto const got = answers_.wait_for(1);
  ASSERT_EQ(failure_of(got.at(0).second), error_kind::deadline_exceeded);
  EXPECT_THAT(std::get<error>(got.at(0).second).what(), HasSubstr("does not answer"));
  ::kill(pid, SIGCONT);
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
  EXPECT_EQ(process()["started"], 1);
}

TEST_F(a_remote_executor, ends_a_process_that_does_not_answer) {
  options_.answer_limit = 100ms;
  start();
  stop_process(process()["pid"].get<pid_t>());
  EXPECT_EQ(sum_of(ask(sum, 2)), 12) << "by another";
  EXPECT_GE(process()["started"].get<int>(), 2);
  EXPECT_THAT(process()["last_end"].get<std::string>(), HasSubstr("said nothing for 100 ms"));
}

TEST_F(a_remote_executor, ends_a_process_that_does_not_answer_although_nobody_waits_any_more) {
  options_.answer_limit = 500ms;
  start();
  auto const pid = process()["pid"];
  stop_process(pid.get<pid_t>());
  send(sum, 1, 0, 1200ms);  // long enough that the process is asked meanwhile
  (void)answers_.wait_for(1);
  auto const until = std::chrono::steady_clock::now() + patience;
  while (process()["pid"] == pid && std::chrono::steady_clock::now() < until) {
  }
  EXPECT_NE(process()["pid"], pid);
}

TEST_F(a_remote_executor, gives_what_a_killed_process_computed_to_the_next_and_blames_nobody) {
  start();
  for (int kills = 0; kills < 4; ++kills) {
    auto const before = answers_.wait_for(0).size();
    ::kill(process()["pid"].get<pid_t>(), SIGKILL);
    send(sum, kills, kills);
    EXPECT_EQ(sum_of(answers_.wait_for(before + 1).at(before).second), 10 + kills);
  }
  EXPECT_EQ(process()["started"], 5);
  EXPECT_EQ(process()["ended"]["killed"], 4);
  EXPECT_EQ(process()["ended"]["model"], 0);
  EXPECT_EQ(executor_->status()["models"][sum]["ended_executors"], 0);
}

TEST_F(a_remote_executor, refuses_a_model_that_ends_it_again_and_again) {
  start();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(failure_of(ask(mischief::abort)), error_kind::aborted);
  }
  auto const refused = ask(mischief::none);
  ASSERT_EQ(failure_of(refused), error_kind::unavailable);
  EXPECT_THAT(std::get<error>(refused).what(),
              MatchesRegex("model 'rogue' has failed: its process was ended by signal 6 .*while it "
                           "computed it; it is tried again in [0-9.]+ s"));
  ASSERT_TRUE(std::get<error>(refused).retry_after());
  EXPECT_LE(*std::get<error>(refused).retry_after(), 1s);
  EXPECT_EQ(executor_->status()["models"][rogue]["state"], "failed");
  auto const state = executor_->model_ready(rogue);
  EXPECT_FALSE(state);
  EXPECT_THAT(state.reason, MatchesRegex("failed: its process .* in [0-9.]+ s"));
  EXPECT_TRUE(state.retry_after);
  EXPECT_EQ(executor_->model_ready(other).reason, "cold");
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
  EXPECT_TRUE(executor_->model_ready(sum));
}

TEST_F(a_remote_executor, does_not_compute_what_nobody_waits_for) {
  start();
  send(mischief::hang, 0);
  auto const waiting = send(sum, 1, 1);
  executor_->cancel(waiting);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::cancelled);
  executor_->cancel(waiting);
  executor_->cancel(0);
}

/// Less than computing took before, so that no answer is predicted in time; one may be, where nobody is before it.
constexpr std::chrono::microseconds too_short{5};

/// 1 where a request was late, 0 where it was answered, and a failure otherwise.
int late(infer_result const& of) {
  auto const failure = failure_of(of);
  EXPECT_THAT(failure, AnyOf(std::nullopt, error_kind::deadline_exceeded));
  return failure ? 1 : 0;
}

TEST_F(a_remote_executor, refuses_at_once_what_could_not_be_answered_in_time) {
  options_.first.settings["computing_threads"] = 2;
  start();
  for (std::size_t i = 0; i < scheduler::recent_times::enough; ++i) {
    ASSERT_FALSE(failure_of(ask(other, 0)));
  }
  auto const answered = answers_.wait_for(0).size();
  send(other, 0, 7, too_short);
  auto const failed = late(answers_.wait_for(answered + 1).back().second);  // nobody was before it
  ASSERT_FALSE(failure_of(ask(other, 0)));
  send(other, static_cast<std::int64_t>(mischief::hang), 8);
  auto const before = answers_.wait_for(0).size();
  send(other, 0, 9, too_short);
  auto const refused = answers_.wait_for(before + 1).back();
  EXPECT_EQ(refused.first, 9);
  ASSERT_EQ(failure_of(refused.second), error_kind::unavailable);
  EXPECT_THAT(std::get<error>(refused.second).what(), HasSubstr("others come before it"));
  EXPECT_TRUE(std::get<error>(refused.second).retry_after());
  send(sum, 0, 10, too_short);
  auto const of_another = answers_.wait_for(before + 2).back();  // nothing is known of it
  EXPECT_EQ(of_another.first, 10);
  late(of_another.second);
  auto const seen = executor_->status()["models"];
  EXPECT_EQ(seen[other]["refused"], 1);
  EXPECT_EQ(seen[other]["refused_for_time"], 1);
  EXPECT_EQ(seen[other]["queue"], 1);
  auto const computing = [this] {
    return executor_->status()["models"][other]["computing"].get<int>();
  };
  for (auto const end = std::chrono::steady_clock::now() + patience;
       computing() == 0 && std::chrono::steady_clock::now() < end;) {
    std::this_thread::yield();
  }
  EXPECT_EQ(computing(), 1);
  EXPECT_EQ(seen[other]["failed"], 1 + failed) << "one was refused";
  EXPECT_EQ(seen[sum]["refused"], 0);
}

TEST_F(a_remote_executor, foretells_when_answers_come_where_those_that_are_late_are_refused) {
  options_.first.settings["rejects"] = true;
  options_.first.models[other].foretells = true;
  start();
  for (std::size_t i = 0; i < 30; ++i) {
    ASSERT_FALSE(failure_of(ask(other, 0)));
  }
  for (std::size_t i = 0; i < 5; ++i) {  // so many in a row are a change
    ASSERT_FALSE(failure_of(ask(other, static_cast<std::int64_t>(mischief::take_time))));
  }
  EXPECT_FALSE(failure_of(ask(other, 0))) << "nobody was before it";
  send(other, static_cast<std::int64_t>(mischief::hang), 8);
  auto const before = answers_.wait_for(0).size();
  send(other, 0, 9);
  auto const refused = answers_.wait_for(before + 1).back();
  EXPECT_EQ(refused.first, 9);
  ASSERT_EQ(failure_of(refused.second), error_kind::unavailable);
  EXPECT_THAT(std::get<error>(refused.second).what(),
              HasSubstr("since others come before, where its latency target is 0.300 s"));
  EXPECT_TRUE(std::get<error>(refused.second).retry_after());
}

TEST_F(a_remote_executor, that_computes_one_by_one_refuses_what_waits_for_other_models) {
  options_.one_by_one = true;
  start();
  for (std::size_t i = 0; i < scheduler::recent_times::enough; ++i) {
    ASSERT_FALSE(failure_of(ask(other, 0)));
    ASSERT_FALSE(failure_of(ask(mischief::none)));
  }
  ASSERT_FALSE(failure_of(ask(other, 0)));
  auto const before = answers_.wait_for(0).size();
  send(mischief::hang, 8);
  send(other, 0, 9, too_short);
  EXPECT_EQ(failure_of(answers_.wait_for(before + 1).back().second), error_kind::unavailable);
}

TEST_F(a_remote_executor, does_not_give_what_was_cancelled_to_the_next_process) {
  start();
  auto const pid = process()["pid"].get<pid_t>();
  stop_process(pid);
  executor_->cancel(send(sum, 1, 0));
  ::kill(pid, SIGKILL);
  EXPECT_EQ(failure_of(answers_.wait_for(1).at(0).second), error_kind::cancelled);
  EXPECT_EQ(sum_of(ask(sum, 2)), 12);
  EXPECT_EQ(executor_->status()["models"][sum]["cancelled"], 1);
}

TEST_F(a_remote_executor, bounds_who_waits_while_it_has_no_process) {
  options_ = options_for("hold");
  options_.first.models[sum].max_queue = 2;
  executor_.emplace(options_);
  for (int i = 0; i < 6; ++i) {
    send(sum, i, i);
  }
  int refused = 0;
  for (auto const& [which, result] : answers_.wait_for(4)) {
    refused += failure_of(result) == error_kind::unavailable ? 1 : 0;
  }
  EXPECT_EQ(refused, 4);
}

TEST_F(a_remote_executor, fails_what_waits_when_it_is_stopped_in_a_hang) {
  start();
  std::size_t late = 0;
  for (std::string said; said.find("computes its answer") == std::string::npos;) {
    send(mischief::hang, 0, 50ms);  // until one has been begun
    auto const got = answers_.wait_for(++late);
    ASSERT_EQ(got.size(), late);
    ASSERT_EQ(failure_of(got.back().second), error_kind::deadline_exceeded);
    said = std::get<error>(got.back().second).what();
  }
  send(sum, 1, 1);
  EXPECT_FALSE(executor_->stop(100ms));
  auto const got = answers_.wait_for(late + 1);
  ASSERT_EQ(got.size(), late + 1);
  EXPECT_EQ(failure_of(got.back().second), error_kind::unavailable);
}

/// A process that waits for the test, where a busy machine would let it wait.
class a_slow_process : public a_remote_executor {
 protected:
  a_slow_process() {
    std::string name = ::testing::TempDir() + "sluice-slow-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    pipe_ = folder_ / "pipe";
    EXPECT_EQ(::mkfifo(pipe_.c_str(), 0600), 0);
  }
  ~a_slow_process() override { std::filesystem::remove_all(folder_); }
  a_slow_process(a_slow_process const&) = delete;
  a_slow_process& operator=(a_slow_process const&) = delete;
  a_slow_process(a_slow_process&&) = delete;
  a_slow_process& operator=(a_slow_process&&) = delete;

  void wait_at(char const* place) { options_.first.settings[place] = pipe_.string(); }
  void await_that_it_waits() const {
    while (!std::filesystem::exists(pipe_.string() + ".waits")) {
      std::this_thread::yield();
    }
  }
  /// Once it waits there. False where it has ended without.
  [[nodiscard]] bool let_go_before(std::future<bool> const& end) const {
    for (;;) {
      bool const has_ended = end.wait_for(1ms) == std::future_status::ready;
      if (int const opened = ::open(pipe_.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
          opened >= 0) {
        std::filesystem::remove(pipe_);  // who comes to it later does not wait any more
        ::close(opened);
        return true;
      }
      if (has_ended) {
        return false;
      }
    }
  }
  [[nodiscard]] std::filesystem::path sign() const { return folder_ / "sign"; }
  [[nodiscard]] std::future<bool> stop(std::chrono::milliseconds grace) {
    return std::async(std::launch::async, [this, grace] { return executor_->stop(grace); });
  }

 private:
  std::filesystem::path folder_, pipe_;
};

TEST_F(a_slow_process, that_computes_nothing_may_take_longer_to_end_than_a_computation) {
  options_.end_limit = patience;
  wait_at("ends_after");
  start();
  EXPECT_EQ(sum_of(ask(sum, 3)), 13);
  auto ended = stop(0ms);
  EXPECT_TRUE(let_go_before(ended));
  EXPECT_TRUE(ended.get());
}

TEST_F(a_slow_process, is_killed_where_it_does_not_end_at_all) {
  options_.end_limit = 100ms;
  wait_at("ends_after");
  start();
  EXPECT_FALSE(executor_->stop(0ms));
}

TEST_F(a_slow_process, whose_threads_are_not_set_up_yet_computes_nothing) {
  options_.end_limit = patience;
  wait_at("prepares_until");
  start();
  await_that_it_waits();
  auto ended = stop(patience);
  EXPECT_EQ(ended.wait_for(1s), std::future_status::timeout);
  EXPECT_TRUE(let_go_before(ended));
  EXPECT_TRUE(ended.get());
}

/// The process aborts where its models go before.
TEST_F(a_slow_process, that_fails_at_a_change_waits_for_its_threads) {
  wait_at("prepares_until");
  start();
  await_that_it_waits();
  auto next = options_.first;
  next.settings["fails_to_change"] = sign().string();
  auto changed = std::async(std::launch::async, [&] { return executor_->change(next); });
  while (!std::filesystem::exists(sign())) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(let_go_before(changed));
  EXPECT_TRUE(changed.get());
  EXPECT_EQ(sum_of(ask(sum, 3)), 13);
  EXPECT_EQ(process()["started"], 2);
  EXPECT_THAT(process()["last_end"].dump(), HasSubstr("there is no memory for what is new"));
}

TEST_F(a_remote_executor, that_only_starts_is_not_waited_for) {
  options_ = options_for("hold");
  executor_.emplace(options_);
  EXPECT_TRUE(executor_->stop(patience)) << "nothing is lost with it";
}

TEST_F(a_remote_executor, that_cannot_start_says_why) {
  auto const failure = [](remote_executor::options const& options) -> error {
    try {
      remote_executor executor{options};
      (void)executor.wait_until_ready();
      return {error_kind::internal, "it started"};
    } catch (error const& why) {
      return why;
    }
  };
  auto const refused = failure(options_for("refuse"));
  EXPECT_EQ(refused.kind(), error_kind::not_found);
  EXPECT_STREQ(refused.what(), "there is nothing to serve");
  auto const crashed = failure(options_for("abort"));
  EXPECT_EQ(crashed.kind(), error_kind::aborted);
  EXPECT_THAT(crashed.what(), HasSubstr("signal 6"));
  auto without = options_for();
  without.program = "/nowhere/sluice-executor";
  EXPECT_EQ(failure(without).kind(), error_kind::unsupported);
  EXPECT_THAT(failure(without).what(), HasSubstr("/nowhere/sluice-executor"));
}

TEST_F(a_remote_executor, starts_no_longer_than_it_is_waited_for) {
  executor_.emplace(options_);
  EXPECT_FALSE(executor_->wait_until_ready([] { return true; }));
}

}  // namespace
}  // namespace sluice::server::testing
