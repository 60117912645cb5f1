/// A remote executor of a test, whose process serves three models: one that adds, and two rogues.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "runtime/server/executor/remote_executor.hpp"
#include "tests/runtime/server_executor/rogue_models.hpp"

namespace sluice::server::testing {

inline constexpr std::size_t sum = 0, rogue = 1, other = 2;

inline remote_executor::options options_for(std::string policy = "") {
  return {.program = std::filesystem::read_symlink("/proc/self/exe").parent_path() /
                     "sluice_test_executor",
          .first = {.settings = nlohmann::json::object(),
                    .policy = std::move(policy),
                    .models = {{"sum", "1"}, {"rogue", "1"}, {"other", "1"}}},
          .compute_limit = patience,
          .answer_limit = patience};
}

/// Once no thread of it runs any more.
inline void stop_process(pid_t pid) {
  ::kill(pid, SIGSTOP);
  auto const is_stopped = [pid] {
    for (auto const& task : std::filesystem::directory_iterator{std::filesystem::path{"/proc"} /
                                                                std::to_string(pid) / "task"}) {
      std::ifstream stat{task.path() / "stat"};
      std::string const text{std::istreambuf_iterator<char>{stat}, {}};
      if (auto const end = text.rfind(')'); end != std::string::npos && text.at(end + 2) != 'T') {
        return false;
      }
    }
    return true;
  };
  while (!is_stopped()) {
    std::this_thread::yield();
  }
}

class a_remote_executor : public ::testing::Test {
 protected:
  void start() {
    executor_.emplace(options_);
    ASSERT_TRUE(executor_->wait_until_ready());
  }

  request_ticket send(std::size_t model, std::int64_t value, int which,
                      std::optional<std::chrono::microseconds> timeout = std::nullopt) {
    infer_request request;
    request.id = std::to_string(which);
    request.inputs.push_back(number("input", value));
    request.timeout = timeout;
    return executor_->submit(model, std::move(request), answers_.take(which));
  }

  request_ticket send(mischief what, int which,
                      std::optional<std::chrono::microseconds> timeout = std::nullopt) {
    return send(rogue, static_cast<std::int64_t>(what), which, timeout);
  }

  infer_result ask(std::size_t model, std::int64_t value) {
    auto const before = answers_.wait_for(0).size();
    send(model, value, 0);
    auto got = answers_.wait_for(before + 1);
    return got.size() > before ? got[before].second : error{error_kind::internal, "no answer came"};
  }

  infer_result ask(mischief what) { return ask(rogue, static_cast<std::int64_t>(what)); }

  [[nodiscard]] nlohmann::json process() const { return executor_->status()["executor"]; }

  remote_executor::options options_ = options_for();
  answers answers_;
  std::optional<remote_executor> executor_;
};

}  // namespace sluice::server::testing
