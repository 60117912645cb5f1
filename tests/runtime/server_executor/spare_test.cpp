// Spare processes, by themselves and behind a remote_executor.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "memhandover/base/error.hpp"
#include "runtime/server/executor/detail/spare_process.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "tests/runtime/server_executor/rogue_models.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using detail::spare_process;
using nlohmann::json;
using ::testing::HasSubstr;

std::filesystem::path program() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "sluice_test_executor";
}

class a_spare_process : public ::testing::Test {
 protected:
  /// Until it is in that state; what it does is heard as the supervisor does it.
  void await(std::string_view state, spare_process& of) {
    while (of.state() != state) {
      pollfd waited{of.awaited(), POLLIN, 0};
      ASSERT_NE(of.awaited(), -1) << "nothing more will come";
      ASSERT_GT(::poll(&waited, 1, 60'000), 0);
      of.hear(now_);
    }
  }
  void await_end(spare_process& of) {
    while (of.awaited() != -1) {
      pollfd waited{of.awaited(), POLLIN, 0};
      ASSERT_GT(::poll(&waited, 1, 60'000), 0);
      of.hear(now_);
    }
  }

  spare_process::clock::time_point now_ = spare_process::clock::now();
  spare_process spare_{program(), 1min};
};

TEST_F(a_spare_process, is_started_when_it_is_wanted_and_taken_once) {
  EXPECT_FALSE(spare_.is_due(now_));
  EXPECT_FALSE(spare_.take());
  spare_.want(json::object());
  ASSERT_TRUE(spare_.is_due(now_));
  spare_.start(now_);
  EXPECT_FALSE(spare_.is_due(now_));
  EXPECT_EQ(spare_.state(), "starting");
  await("ready", spare_);
  auto const pid = spare_.pid();
  auto const taken = spare_.take();
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->process.child.pid(), pid);
  EXPECT_TRUE(taken->was_ready);
  EXPECT_EQ(spare_.state(), "none");
  EXPECT_EQ(spare_.pid(), 0);
  EXPECT_FALSE(spare_.take());
  EXPECT_TRUE(spare_.is_due(now_)) << "there is to be another";
}

TEST_F(a_spare_process, can_be_taken_while_it_starts) {
  spare_.want(json::object());
  spare_.start(now_);
  auto const taken = spare_.take();
  ASSERT_TRUE(taken);
  EXPECT_FALSE(taken->was_ready);
}

TEST_F(a_spare_process, that_has_been_killed_is_not_taken_and_the_next_one_comes_later_each_time) {
  spare_.want(json::object());
  auto expected = spare_process::first_back_off;
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(spare_.is_due(now_));
    spare_.start(now_);
    await("ready", spare_);
    ::kill(spare_.pid(), SIGKILL);
    siginfo_t ended{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(spare_.pid()), &ended, WEXITED | WNOWAIT), 0);
    EXPECT_FALSE(spare_.take());
    await_end(spare_);
    EXPECT_FALSE(spare_.is_due(now_ + expected - 1ms));
    EXPECT_TRUE(spare_.is_due(now_ + expected));
    EXPECT_EQ(spare_.next_look(), now_ + expected);
    now_ += expected;
    expected *= 2;
  }
  now_ += spare_process::longest_back_off;
  spare_.start(now_);
  await("ready", spare_);
  now_ += spare_process::proven;
  ::kill(spare_.pid(), SIGKILL);
  await_end(spare_);
  EXPECT_TRUE(spare_.is_due(now_ + spare_process::first_back_off)) << "it had lived";
}

TEST_F(a_spare_process, that_cannot_prepare_or_start_is_tried_again) {
  spare_.want({{"fail", "there is no device"}});
  spare_.start(now_);
  await_end(spare_);
  EXPECT_EQ(spare_.state(), "none");
  EXPECT_FALSE(spare_.is_due(now_));
  EXPECT_TRUE(spare_.is_due(now_ + spare_process::first_back_off));
  spare_process without{"/nowhere/sluice-executor", 1min};
  without.want(json::object());
  without.start(now_);
  EXPECT_EQ(without.state(), "none");
  EXPECT_FALSE(without.is_due(now_));
  EXPECT_TRUE(without.is_due(now_ + spare_process::first_back_off));
}

TEST_F(a_spare_process, that_takes_too_long_is_ended) {
  spare_.want({{"hang", true}});
  spare_.start(now_);
  EXPECT_EQ(spare_.next_look(), now_ + 1min);
  spare_.hear(now_ + 1min - 1ms);
  EXPECT_EQ(spare_.state(), "starting");
  now_ += 1min;
  spare_.hear(now_);
  EXPECT_EQ(spare_.state(), "none");
  await_end(spare_);
  EXPECT_FALSE(spare_.is_due(now_));
}

TEST_F(a_spare_process, that_is_ended_is_followed_by_none) {
  spare_.want(json::object());
  spare_.start(now_);
  spare_.end();
  await_end(spare_);
  EXPECT_FALSE(spare_.is_due(now_ + 1h));
}

class an_executor_with_a_spare : public ::testing::Test {
 protected:
  void start(json spare = json::object()) {
    remote_executor::options options{
        .program = program(),
        .first = {.settings = {{"spare", std::move(spare)}},
                  .policy = "",
                  .models = {{"sum", "1"}, {"rogue", "1"}, {"other", "1"}}},
        .compute_limit = patience,
        .answer_limit = answer_limit_,
        .spare = true};
    executor_.emplace(std::move(options));
    ASSERT_TRUE(executor_->wait_until_ready());
  }
  [[nodiscard]] json process() const { return executor_->status()["executor"]; }
  pid_t await_spare() {
    for (;;) {
      if (auto const seen = process(); seen["spare"] == "ready") {
        return seen["spare_pid"];
      }
    }
  }
  void await_replacement(pid_t of) {
    for (auto seen = process(); seen["pid"] == of || seen["state"] != "ready"; seen = process()) {
    }
  }
  std::int64_t ask(std::int64_t value) {
    auto const before = answers_.wait_for(0).size();
    infer_request request;
    request.inputs.push_back(number("input", value));
    executor_->submit(0, std::move(request), answers_.take(0));
    return sum_of(answers_.wait_for(before + 1).at(before).second);
  }

  std::chrono::milliseconds answer_limit_ = patience;
  answers answers_;
  std::optional<remote_executor> executor_;
};

TEST_F(an_executor_with_a_spare, is_replaced_by_it_again_and_again) {
  start();
  for (int kills = 1; kills <= 3; ++kills) {
    auto const spare = await_spare();
    auto const former = process()["pid"].get<pid_t>();
    EXPECT_NE(spare, former);
    ::kill(former, SIGKILL);
    EXPECT_EQ(ask(kills), 10 + kills);
    auto const seen = process();
    EXPECT_EQ(seen["pid"], spare);
    EXPECT_EQ(seen["started"], 1 + kills);
  }
}

TEST_F(an_executor_with_a_spare, goes_on_when_the_spare_is_killed_and_has_another) {
  start();
  auto const pid = process()["pid"].get<pid_t>();
  auto const first = await_spare();
  ::kill(first, SIGKILL);
  EXPECT_EQ(ask(1), 11);
  while (await_spare() == first) {
  }
  EXPECT_EQ(process()["pid"], pid);
  EXPECT_EQ(process()["started"], 1);
}

TEST_F(an_executor_with_a_spare, is_replaced_when_both_are_killed_at_once) {
  start();
  for (bool const spare_first : {true, false}) {
    auto const spare = await_spare();
    auto const former = process()["pid"].get<pid_t>();
    ::kill(spare_first ? spare : former, SIGKILL);
    ::kill(spare_first ? former : spare, SIGKILL);
    EXPECT_EQ(ask(1), 11);
    EXPECT_NE(process()["pid"], spare);
  }
}

TEST_F(an_executor_with_a_spare, ends_one_that_does_not_take_its_orders) {
  answer_limit_ = 100ms;
  start();
  auto const spare = await_spare();
  ::kill(spare, SIGSTOP);
  ::kill(process()["pid"].get<pid_t>(), SIGKILL);
  EXPECT_EQ(ask(1), 11) << "by another";
  EXPECT_THAT(process()["last_end"].get<std::string>(), HasSubstr("said nothing for 100 ms"));
}

TEST_F(an_executor_with_a_spare, serves_although_there_can_be_none) {
  start({{"fail", "there is no device"}});
  auto const former = process()["pid"].get<pid_t>();
  EXPECT_EQ(ask(1), 11);
  ::kill(former, SIGKILL);
  EXPECT_EQ(ask(2), 12);
  EXPECT_NE(process()["spare"], "ready");
}

TEST_F(an_executor_with_a_spare, leaves_no_process_behind) {
  start();
  auto const spare = await_spare();
  EXPECT_TRUE(executor_->stop(patience));
  executor_.reset();
  EXPECT_EQ(::kill(spare, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

}  // namespace
}  // namespace sluice::server::testing
