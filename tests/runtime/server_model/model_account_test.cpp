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

using ::testing::HasSubstr;

class an_account : public ::testing::Test {
 protected:
  an_account() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  ~an_account() override { spdlog::set_default_logger(before_); }
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
    account_.on_answer(error{error_kind::model_error, i % 2 == 0 ? "one\ntext" : "another"});
  }
  EXPECT_EQ(lines(), 2) << log_.str();
  EXPECT_THAT(log_.str(), HasSubstr(R"(model=m version=3 reason="one\x0atext" repeated=0)"));
}

TEST_F(an_account, logs_a_bounded_part_of_long_texts_however_different_they_are) {
  for (int i = 0; i < 1000; ++i) {
    account_.on_answer(
        error{error_kind::model_error, std::to_string(i) + std::string(4000, '\x01')});
  }
  EXPECT_LE(lines(), 16);
  EXPECT_LT(log_.str().size(), 100'000U);
}

TEST_F(an_account, logs_no_other_failure) {
  account_.on_answer(error{error_kind::invalid_argument, "the request is wrong"});
  account_.on_answer(error{error_kind::unavailable, "too many wait"});
  account_.on_answer(infer_response{});
  EXPECT_EQ(lines(), 0) << log_.str();
}

}  // namespace
}  // namespace sluice::server::testing
