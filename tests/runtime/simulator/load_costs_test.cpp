#include "runtime/simulator/load_costs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::simulator {
namespace {

using testing::HasSubstr;

class records : public testing::Test {
 protected:
  records() : folder_(testing::TempDir() + "simulator_records") {
    std::filesystem::create_directories(folder_);
  }
  ~records() override { std::filesystem::remove_all(folder_); }

  void write(std::string const& name, std::string const& text) const {
    std::ofstream{folder_ + "/" + name} << text;
  }
  std::string refusal() const {
    try {
      (void)costs_of_records(folder_, "box");
    } catch (error const& wrong) {
      return wrong.what();
    }
    return "was read";
  }

  std::string const folder_;
  std::string const handover_ = R"({"cells": [{"params": {}, "metrics": {"latency_us":
      {"n": 9, "p50": 100, "p90": 300, "p99": 800, "max": 20000}}}]})";
  std::string const copies_ = R"({"cells": [
      {"params": {"part": "copy out"}, "metrics": {"moved_bytes_per_s": {"value": 1}}},
      {"params": {"part": "copy in"}, "metrics": {"moved_bytes_per_s": {"value": 5e10}}}]})";
};

TEST_F(records, say_what_a_load_takes) {
  write("handover-box.json", handover_);
  write("parking-box.json", copies_);
  auto const costs = costs_of_records(folder_, "box");
  EXPECT_EQ(costs.bytes_per_s, 5e10);
  double const handover = 0.5 * 50e-6 + 0.4 * 200e-6 + 0.09 * 550e-6 + 0.01 * 10400e-6;
  EXPECT_NEAR(costs.mean_s(5'000'000'000), 0.1 + handover, 1e-12);
}

TEST_F(records, that_are_not_there_or_not_whole_are_named) {
  EXPECT_THAT(refusal(), HasSubstr("handover-box.json"));
  write("handover-box.json", "{}");
  EXPECT_THAT(refusal(), HasSubstr("handover-box.json: is no record: it has no cells"));
  write("handover-box.json", R"({"cells": [{"metrics": {"latency_us": {"p50": 1}}}]})");
  EXPECT_THAT(refusal(), HasSubstr("no cell has latency_us.p90"));
  write("handover-box.json", handover_);
  EXPECT_THAT(refusal(), HasSubstr("parking-box.json"));
  write("parking-box.json", R"({"cells": []})");
  EXPECT_THAT(refusal(), HasSubstr("no cell has moved_bytes_per_s.value"));
  write("handover-box.json", R"({"cells": [{"metrics": {"latency_us":
      {"p50": 100, "p90": 30, "p99": 800, "max": 20000}}}]})");
  EXPECT_THAT(refusal(), HasSubstr("quantiles must rise"));
}

TEST(a_measured_time, is_drawn_by_its_quantiles) {
  measured_time const time{1.0, 2.0, 4.0, 10.0};
  draws random{1};
  int below_median = 0, below_last = 0;
  double sum = 0.0;
  for (int i = 0; i < 100'000; ++i) {
    double const each = time.draw(random);
    below_median += each < 1.0 ? 1 : 0;
    below_last += each < 4.0 ? 1 : 0;
    sum += each;
  }
  EXPECT_NEAR(below_median, 50'000, 600);
  EXPECT_NEAR(below_last, 99'000, 130);
  EXPECT_NEAR(sum / 100'000, time.mean(), 0.02);
  EXPECT_EQ(measured_time{0.5}.draw(random), 0.5);
  EXPECT_EQ(measured_time{0.5}.mean(), 0.5);
}

}  // namespace
}  // namespace sluice::simulator
