#include "memhandover/device/cuda_driver.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

// Two steps, as in the driver's own table.
#define TEXT(name) #name
#define NAMES(name) TEXT(name),
std::vector<std::string> const needed_by_pools{SLUICE_CUDA_FUNCTIONS(NAMES)};
std::vector<std::string> const needed_by_parking{SLUICE_OPTIONAL_CUDA_FUNCTIONS(NAMES)};
#undef NAMES
#undef TEXT

std::shared_ptr<cuda_driver const> driver_without(std::string const& missing) {
  static char function;
  return cuda_driver::load(
      [&](char const* name) -> void* { return name == missing ? nullptr : &function; });
}

std::string refusal(cuda_driver const& driver, driver_part part) {
  try {
    driver.expect(part, "it is not done");
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unsupported);
    return why.what();
  }
  return "";
}

TEST(cuda_driver_test, a_driver_without_what_a_pool_needs_is_refused) {
  for (auto const& name : needed_by_pools) {
    EXPECT_THROW(driver_without(name), error) << name;
  }
}

TEST(cuda_driver_test, a_driver_without_what_parking_alone_needs_is_not_refused) {
  for (auto const& name : needed_by_parking) {
    auto const driver = driver_without(name);
    std::string answers;
    for (auto const part : {driver_part::pinning, driver_part::copying, driver_part::hashing}) {
      answers += refusal(*driver, part);
    }
    if (name == "cuThreadExchangeStreamCaptureMode") {
      EXPECT_EQ(answers, "") << "all goes without";
      relaxed_capture const relaxed{*driver};
    } else {
      EXPECT_EQ(answers.find("it is not done: the driver lacks " + name), 0U) << answers;
    }
  }
}

TEST(cuda_driver_test, a_part_does_not_need_what_another_does) {
  EXPECT_EQ(refusal(*driver_without("cuLaunchKernel"), driver_part::copying), "");
  EXPECT_EQ(refusal(*driver_without("cuLaunchKernel"), driver_part::pinning), "");
  EXPECT_EQ(refusal(*driver_without("cuLaunchKernel"), driver_part::hashing),
            "it is not done: the driver lacks cuLaunchKernel");
}

}  // namespace
}  // namespace sluice::memhandover
