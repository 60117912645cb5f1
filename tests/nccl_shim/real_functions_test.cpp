/// How NCCL's functions are found.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "abi/nccl_abi.hpp"

namespace sluice::nccl_shim {
namespace {

/// Those that there are, and how often each was looked for.
std::map<std::string, void*> there;     // NOLINT(cert-err58-cpp)
std::map<std::string, int> looked_for;  // NOLINT(cert-err58-cpp)

}  // namespace

void* real_function(char const* name) noexcept {
  ++looked_for[name];
  auto const found = there.find(name);
  return found != there.end() ? found->second : nullptr;
}

namespace {

int answer() {
  return 42;
}

TEST(real_functions, are_looked_for_until_they_are_found_and_then_no_more) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ((real<"ncclOfTomorrow", int()>()), nullptr);
  }
  EXPECT_EQ(looked_for["ncclOfTomorrow"], 3);
  there["ncclOfTomorrow"] = reinterpret_cast<void*>(&answer);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ((real<"ncclOfTomorrow", int()>()()), 42);
  }
  EXPECT_EQ(looked_for["ncclOfTomorrow"], 4);
  EXPECT_EQ((real<"ncclAnother", int()>()), nullptr);
}

}  // namespace
}  // namespace sluice::nccl_shim
