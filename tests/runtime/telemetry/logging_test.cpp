#include "runtime/telemetry/logging.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <string>

namespace sluice::telemetry {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

/// Is there before spdlog is, and so still there when that has gone.
struct last_of_all {
  bool speaks = false;
  ~last_of_all() {
    if (speaks) {
      spdlog::warn("to the end");
    }
  }
} last;  // NOLINT(cert-err58-cpp)

class logging : public testing::Test {
 protected:
  void TearDown() override { ::unsetenv("SLUICE_LOG"); }

  /// What `act` writes to standard error with SLUICE_LOG at `level`.
  template <class Act>
  static std::string logged(char const* level, Act const& act) {
    ::setenv("SLUICE_LOG", level, 1);
    testing::internal::CaptureStderr();
    set_up_logging("sluice-test", "info");
    act();
    spdlog::default_logger()->flush();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(logging, a_line_has_utc_time_level_program_and_pid_before_the_sentence) {
  EXPECT_THAT(
      logged("", [] { spdlog::info("listening port={}", 8000); }),
      MatchesRegex(
          "[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z info sluice-test\\[[0-9]+\\] "
          "listening port=8000\n"));
}

TEST_F(logging, the_environment_sets_the_level) {
  auto const talk = [] {
    spdlog::debug("details");
    spdlog::warn("trouble");
  };
  EXPECT_THAT(logged("debug", talk), HasSubstr("details"));
  EXPECT_THAT(logged("error", talk), testing::IsEmpty());
}

TEST_F(logging, an_unknown_level_is_told_and_the_default_used) {
  auto const text = logged("loud", [] { spdlog::info("still here"); });
  EXPECT_THAT(text, HasSubstr(R"(SLUICE_LOG names no level value="loud")"));
  EXPECT_THAT(text, HasSubstr("still here"));
}

TEST_F(logging, who_speaks_when_the_process_has_all_but_ended_is_heard) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        set_up_logging("sluice-test", "info");
        last.speaks = true;
        std::exit(0);
      },
      testing::ExitedWithCode(0), "to the end");
}

TEST_F(logging, a_quoted_value_stays_on_one_line) {
  EXPECT_EQ(quoted("a b"), R"("a b")");
  EXPECT_EQ(quoted("say \"no\"\n\\"), R"("say \"no\"\x0a\\")");
}

}  // namespace
}  // namespace sluice::telemetry
