#include "posix/process_facts.hpp"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <string>

namespace sluice::posix {
namespace {

TEST(process_facts, a_process_is_one_by_its_pid_and_as_itself) {
  EXPECT_GT(start_ticks_of("self"), 0U);
  EXPECT_EQ(start_ticks_of("self"), start_ticks_of(std::to_string(::getpid())));
  EXPECT_GT(pid_namespace_of("self"), 0U);
  EXPECT_EQ(pid_namespace_of("self"), pid_namespace_of(std::to_string(::getpid())));
}

TEST(process_facts, the_first_process_began_before_this_one) {
  EXPECT_LT(start_ticks_of("1"), start_ticks_of("self"));
}

TEST(process_facts, of_none_nothing_is_known) {
  EXPECT_EQ(start_ticks_of("0"), 0U);
  EXPECT_EQ(pid_namespace_of("0"), 0U);
}

TEST(process_facts, a_name_may_hold_what_looks_like_fields) {
  auto const before = start_ticks_of("self");
  ASSERT_EQ(::prctl(PR_SET_NAME, "a) b 1 2 (3"), 0);
  EXPECT_EQ(start_ticks_of("self"), before);
}

}  // namespace
}  // namespace sluice::posix
