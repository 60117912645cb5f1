#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memhandover/base/error.hpp"
#include "runtime/torch/device_memory.hpp"
#include "runtime/torch/spare.hpp"

namespace sluice::server::testing {
namespace {

using nlohmann::json;

TEST(a_spare_executor, prepares_for_what_another_says_of_itself) {
  EXPECT_NO_THROW(prepare_spare(preparation_for({.cuda_ordinal = -1}, 1)));
}

TEST(a_spare_executor, refuses_what_is_no_preparation) {
  for (auto const* const wrong :
       {"null", "[]", "3", "{}", R"({"device": -1})", R"({"device": -2, "threads": 1})",
        R"({"device": "0", "threads": 1})", R"({"device": 0.5, "threads": 1})",
        R"({"device": 64, "threads": 1})", R"({"device": -1, "threads": 0})",
        R"({"device": -1, "threads": 100000000000000000000})",
        R"({"device": 18446744073709551615, "threads": 1})"}) {
    try {
      prepare_spare(json::parse(wrong));
      ADD_FAILURE() << wrong;
    } catch (error const& refused) {
      EXPECT_EQ(refused.kind(), error_kind::invalid_argument) << wrong;
    }
  }
}

TEST(free_device_memory, is_not_known_of_what_is_no_device) {
  EXPECT_FALSE(free_device_memory(-1));
  EXPECT_FALSE(free_device_memory(10'000));
}

}  // namespace
}  // namespace sluice::server::testing
