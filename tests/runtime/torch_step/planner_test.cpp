/// What a job says that waits for memory for long.
#include "runtime/torch/step/detail/planner.hpp"

#include <gmock/gmock.h>

#include <string>

#include "tests/runtime/torch_step/shared_training.hpp"

using namespace sluice::testing;
using ::testing::HasSubstr;

namespace {

class torch_step_planner : public shared_training {};

TEST_F(torch_step_planner, says_for_what_it_waits_and_who_has_it) {
  script_.needed_bytes = 500;
  script_.waits_in_vain = 3;
  sluice::detail::planner planner{sluice::detail::attach(false), true, std::chrono::seconds{0}};
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(planner.next(4, 4), 4);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("sluice: a micro-batch of 1 samples waits for 500 bytes\n"
                        "sluice: The script holds it all. Ask the test.\n"));
}

TEST_F(torch_step_planner, says_nothing_at_first) {
  script_.needed_bytes = 500;
  script_.waits_in_vain = 3;
  sluice::detail::planner planner{sluice::detail::attach(false), true};
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(planner.next(4, 4), 4);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
