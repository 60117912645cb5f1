/// What a host learns of its models outlives it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;

class a_host_that_remembers : public a_host {
 protected:
  a_host_that_remembers() {
    auto made = (std::filesystem::temp_directory_path() / "experience-XXXXXX").string();
    folder_ = ::mkdtemp(made.data());
    begin();
  }
  ~a_host_that_remembers() override {
    options_ = {};
    std::filesystem::remove_all(folder_);
  }

  void begin() {
    options_ = {};
    options_.tick = 5ms;
    options_.learnt = std::make_shared<experience_file>(path(), 10ms);
  }
  void start_with(std::string const& fingerprint) {
    add(5).set_fingerprint(fingerprint);
    start(8);
  }
  void end() {
    TearDown();
    options_ = {};
    answers_.clear();
    asked_ = 0;
    begin();
  }
  [[nodiscard]] std::filesystem::path path() const { return folder_ / "file"; }
  [[nodiscard]] scheduler::model_report report() const {
    return host_->snapshot().models[0].report;
  }
  void learn() {
    for (int i = 0; i < 40; ++i) {
      ASSERT_EQ(sum_of(ask(0, 1)), 11);
    }
  }

  std::filesystem::path folder_;
};

TEST_F(a_host_that_remembers, knows_at_once_what_the_last_one_knew) {
  start_with("five");
  EXPECT_EQ(report().slow_rate_per_s, 0.0);
  learn();
  end();
  start_with("five");
  auto const seen = report();
  EXPECT_GT(seen.slow_rate_per_s, 0.0);
  EXPECT_EQ(seen.observed_requests, 40U);
  EXPECT_GT(seen.warm.gaps_observed, 30.0);
  EXPECT_EQ(seen.arrivals, 0U);
}

TEST_F(a_host_that_remembers, knows_nothing_of_a_model_that_has_changed) {
  start_with("five");
  learn();
  end();
  start_with("another five");
  EXPECT_EQ(report().slow_rate_per_s, 0.0);
  EXPECT_EQ(report().observed_requests, 0U);
}

TEST_F(a_host_that_remembers, writes_while_it_serves) {
  start_with("five");
  learn();
  while (!std::filesystem::exists(path())) {
    std::this_thread::yield();
  }
}

TEST_F(a_host_that_remembers, has_written_before_it_leaves_its_models_to_another) {
  options_.learnt = std::make_shared<experience_file>(path(), 1h);
  start_with("five");
  learn();
  EXPECT_FALSE(std::filesystem::exists(path()));
  host_->keep_warm();
  EXPECT_TRUE(std::filesystem::exists(path())) << "this process may be ended from now on";
}

}  // namespace
}  // namespace sluice::server::testing
