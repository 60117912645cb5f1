/// A job on a (fake) GPU gives its gate the bound that the server wants, as long as there is one.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "runtime/step/run_ahead_choice.hpp"
#include "tests/runtime/step/pool_fixture.hpp"

namespace sluice::test {
namespace {

class run_ahead_process_test : public pool_process_test {
 protected:
  void SetUp() override {
    pool_process_test::SetUp();
    (void)::setenv("LD_LIBRARY_PATH", SLUICE_FAKE_DRIVER_FOLDER, 1);
    memhandover::broker_options wanted;
    wanted.runtime_dir = folder_;
    wanted.backend = "cuda";
    wanted.pool_bytes = 64 * bytes_of_a_mebibyte;
    wanted.chunk_bytes = 2 * bytes_of_a_mebibyte;
    broker_ = memhandover::ensure_broker(wanted);
  }
  void TearDown() override {
    broker_.reset();
    (void)::unsetenv("LD_LIBRARY_PATH");
    (void)::unsetenv("SLUICE_RUN_AHEAD_US");
    pool_process_test::TearDown();
  }

  child start(std::string const& role, std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.begin(), folder_);
    child started{role, arguments};
    EXPECT_EQ(started.line(), "joined");
    return started;
  }

  /// A server may be found before it has said what it wants.
  static void expect_bound(child& job, std::string const& nanoseconds) {
    auto said = job.line();
    std::chrono::nanoseconds const unsaid = step::default_run_ahead;
    if (said == "bound " + std::to_string(unsaid.count())) {
      said = job.line();
    }
    EXPECT_EQ(said, "bound " + nanoseconds);
  }

 private:
  memhandover::unique_fd broker_;  ///< keeps it
};

TEST_F(run_ahead_process_test, the_gate_is_given_what_the_server_wants_until_the_server_is_gone) {
  auto job = start("bounded");
  auto first = start("publisher", {"70"});
  expect_bound(job, "70000");
  EXPECT_EQ(status()["pool"]["run_ahead_us"], 70.0);
  first.kill();
  EXPECT_EQ(job.line(), "bound 0");
  EXPECT_TRUE(status()["pool"]["run_ahead_us"].is_null());
  auto second = start("publisher", {"333"});
  expect_bound(job, "333000");
  await([this] { return status()["clients"][0]["run_ahead_us"] == 333.0; }, "the job's own word");
}

TEST_F(run_ahead_process_test, what_takes_longer_than_the_bound_is_shown_by_name) {
  auto job = start("bounded");
  auto server = start("publisher", {"333"});
  expect_bound(job, "333000");
  auto const shown = [this] { return status()["clients"][0]["long_units"]; };
  await([&] { return shown().size() == 1; }, "the one unit that is longer");
  EXPECT_EQ(shown()[0]["name"], "void attend<bfloat16>(float*)");
  EXPECT_EQ(shown()[0]["us"], 400.0);
  EXPECT_EQ(shown()[0]["times"], 5);
  server.kill();
  await([&] { return shown().empty(); }, "without a bound nothing is longer");
}

TEST_F(run_ahead_process_test, a_job_without_micro_batches_is_bounded_as_well) {
  auto job = start("bounded", {"without micro-batches"});
  auto server = start("publisher", {"70"});
  expect_bound(job, "70000");
  server.kill();
  EXPECT_EQ(job.line(), "bound 0");
}

TEST_F(run_ahead_process_test, what_the_job_says_of_itself_comes_before_what_the_server_wants) {
  (void)::setenv("SLUICE_RUN_AHEAD_US", "450", 1);
  auto job = start("bounded");
  auto server = start("publisher", {"70"});
  EXPECT_EQ(job.line(), "bound 450000");
  server.kill();
  EXPECT_EQ(job.line(), "bound 0");
}

}  // namespace
}  // namespace sluice::test
