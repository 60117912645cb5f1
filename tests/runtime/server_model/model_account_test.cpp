#include "runtime/server/model_account.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::HasSubstr;

class an_account : public ::testing::Test {
 protected:
  an_account() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  ~an_account() override { spdlog::set_default_logger(before_); }
  void answer(infer_result const& result, std::chrono::nanoseconds took = 1ms) {
    account_.on_answer(result, took, 1);
  }
  [[nodiscard]] auto lines() const {
    auto const text = log_.str();
    return std::count(text.begin(), text.end(), '\n');
  }

  std::ostringstream log_;
  std::shared_ptr<spdlog::logger> before_;
  model_account account_{"m", "3"};
};

TEST_F(an_account, logs_what_a_model_raises_once_for_each_text) {
  for (int i = 0; i < 1000; ++i) {
    answer(error{error_kind::model_error, i % 2 == 0 ? "one\ntext" : "another"});
  }
  EXPECT_EQ(lines(), 2) << log_.str();
  EXPECT_THAT(log_.str(), HasSubstr(R"(model=m version=3 reason="one\x0atext" repeated=0)"));
}

TEST_F(an_account, says_which_request_a_model_has_failed) {
  account_.on_answer(error{error_kind::model_error, "text"}, std::chrono::nanoseconds{1}, 1,
                     "a \"name\"" + std::string(1000, 'x'));
  EXPECT_THAT(log_.str(), HasSubstr(R"(others=0 id="a \"name\"xxx)"));
  EXPECT_LT(log_.str().size(), 500U);
}

TEST_F(an_account, logs_a_bounded_part_of_long_texts_however_different_they_are) {
  for (int i = 0; i < 1000; ++i) {
    answer(error{error_kind::model_error, std::to_string(i) + std::string(4000, '\x01')});
  }
  EXPECT_LE(lines(), 16);
  EXPECT_LT(log_.str().size(), 100'000U);
}

TEST_F(an_account, logs_no_other_failure) {
  answer(error{error_kind::invalid_argument, "the request is wrong"});
  answer(error{error_kind::unavailable, "too many wait"});
  answer(infer_response{});
  EXPECT_EQ(lines(), 0) << log_.str();
}

TEST_F(an_account, has_what_was_measured_and_nothing_else) {
  infer_response good;
  good.times = {.queue = 5us, .compute = 30us};
  account_.on_answer(good, 40us, 4);
  account_.on_answer(good, 60us, 1);
  answer(error{error_kind::model_error, "it raised"}, 7us);
  answer(error{error_kind::cancelled, "the client has left"}, 3us);
  auto const seen = describe(account_.statistics());
  auto const duration = [](int count, int ns) { return json{{"count", count}, {"ns", ns}}; };
  EXPECT_EQ(seen["name"], "m");
  EXPECT_EQ(seen["version"], "3");
  EXPECT_EQ(seen["inference_count"], 5);
  EXPECT_EQ(seen["execution_count"], 2);
  auto const& stats = seen["inference_stats"];
  EXPECT_EQ(stats["success"], duration(2, 100'000));
  EXPECT_EQ(stats["fail"], duration(2, 10'000));
  EXPECT_EQ(stats["queue"], duration(2, 10'000));
  EXPECT_EQ(stats["compute_infer"], duration(2, 60'000));
  for (auto const* const unmeasured :
       {"compute_input", "compute_output", "cache_hit", "cache_miss"}) {
    EXPECT_EQ(stats[unmeasured], duration(0, 0)) << unmeasured;
  }
}

TEST_F(an_account, counts_each_computation_once_by_its_size) {
  auto const of = [](batch_share share, std::chrono::nanoseconds compute) {
    infer_response made;
    made.times = {.queue = 0ns, .compute = compute, .batch = share};
    return made;
  };
  account_.on_answer(of({.requests = 2, .samples = 5, .is_first = false}, 30us), 40us, 4);
  account_.on_answer(of({.requests = 2, .samples = 5, .is_first = true}, 30us), 40us, 1);
  account_.on_answer(of({}, 10us), 40us, 3);
  auto const seen = describe(account_.statistics());
  EXPECT_EQ(seen["inference_count"], 8);
  EXPECT_EQ(seen["execution_count"], 2);
  EXPECT_EQ(seen["inference_stats"]["compute_infer"]["ns"], 70'000);
  ASSERT_EQ(seen["batch_stats"].size(), 2U);
  EXPECT_EQ(seen["batch_stats"][0]["batch_size"], 3);
  EXPECT_EQ(seen["batch_stats"][1]["batch_size"], 5);
  EXPECT_EQ(seen["batch_stats"][1]["compute_infer"], (json{{"count", 1}, {"ns", 30'000}}));
}

TEST_F(an_account, counts_answers_by_how_long_they_took) {
  infer_response warm, cold;
  warm.times = {.queue = 0ns, .compute = 1us};
  cold.times = {.queue = 0ns, .compute = 1us, .found_cold = true};
  account_.on_answer(warm, 500us, 1);
  account_.on_answer(warm, 3ms, 1);
  account_.on_answer(cold, 1min, 1);
  auto const seen = account_.statistics();
  EXPECT_EQ(seen.warm.counts.at(0), 1U);
  EXPECT_EQ(seen.warm.counts.at(3), 1U);
  EXPECT_EQ(seen.warm.total, 3500us);
  EXPECT_EQ(seen.cold.counts.back(), 1U);
}

TEST_F(an_account, dates_the_last_inference_and_no_failure) {
  EXPECT_EQ(describe(account_.statistics())["last_inference"], 0);
  answer(error{error_kind::model_error, "it raised"});
  EXPECT_EQ(describe(account_.statistics())["last_inference"], 0);
  auto const before =
      std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
  answer(infer_response{});
  EXPECT_GE(describe(account_.statistics())["last_inference"].get<std::int64_t>(),
            before.time_since_epoch().count());
  EXPECT_EQ(account_.statistics().queue.count, 0U) << "it was not measured";
}

TEST_F(an_account, tells_failures_apart_by_reason) {
  for (auto const kind : {error_kind::unavailable, error_kind::deadline_exceeded,
                          error_kind::out_of_memory, error_kind::cancelled, error_kind::model_error,
                          error_kind::aborted, error_kind::internal}) {
    answer(error{kind, "why"});
  }
  EXPECT_EQ(account_.statistics().failures, (std::array<std::uint64_t, 4>{3, 1, 2, 1}));
}

}  // namespace
}  // namespace sluice::server::testing
