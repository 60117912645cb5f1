/// Training in a process that shares a scripted pool.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

#include "tests/runtime/torch_step/scripted_runtime.hpp"
#include "tests/runtime/torch_step/small_training.hpp"

namespace sluice::testing {

/// Says that this process runs under `sluice run`, and begins each test with a script in which
/// nothing goes away.
class shared_training : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    Dl_info here{};
    ASSERT_NE(::dladdr(reinterpret_cast<void const*>(&the_script), &here), 0);
    ::setenv("SLUICE_RUN", "1", 1);
    ::setenv("SLUICE_RUNTIME_LIBRARY", here.dli_fname, 1);
  }
  void SetUp() override { script_ = {}; }

  script& script_ = the_script();
};

}  // namespace sluice::testing
