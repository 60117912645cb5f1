#include "runtime/launcher/environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sluice::launcher {
namespace {

using testing::ElementsAre;

TEST(environment, a_variable_is_found_by_its_whole_name) {
  environment const env{{"PATHS=no", "PATH=yes", "EMPTY="}};
  EXPECT_EQ(env.get("PATH"), "yes");
  EXPECT_EQ(env.get("EMPTY"), "");
  EXPECT_EQ(env.get("PAT"), std::nullopt);
}

TEST(environment, setting_replaces_every_entry_of_that_name) {
  environment env{{"A=1", "B=2", "A=3"}};
  env.set("A", "4");
  EXPECT_THAT(env.entries(), ElementsAre("B=2", "A=4"));
  env.unset("B");
  EXPECT_THAT(env.entries(), ElementsAre("A=4"));
}

TEST(environment, lists_grow_in_front_and_behind) {
  environment env;
  env.prepend("PYTHONPATH", "/one");
  env.prepend("PYTHONPATH", "/two");
  env.append("LD_PRELOAD", "/a.so");
  env.append("LD_PRELOAD", "/b.so");
  EXPECT_EQ(env.get("PYTHONPATH"), "/two:/one");
  EXPECT_EQ(env.get("LD_PRELOAD"), "/a.so:/b.so");
}

TEST(environment, a_list_names_nothing_twice) {
  environment env{{"LD_PRELOAD=/a.so /gate.so:/c.so"}};
  env.append("LD_PRELOAD", "/gate.so");
  EXPECT_EQ(env.get("LD_PRELOAD"), "/a.so /gate.so:/c.so");
  env.append("LD_PRELOAD", "/gate");
  EXPECT_EQ(env.get("LD_PRELOAD"), "/a.so /gate.so:/c.so:/gate");
}

TEST(environment, an_element_leaves_its_list_and_the_last_one_takes_the_list_along) {
  environment env{{"PYTHONPATH=/a:/b:/a/c:/b"}};
  env.remove("PYTHONPATH", "/b");
  EXPECT_EQ(env.get("PYTHONPATH"), "/a:/a/c");
  env.remove("PYTHONPATH", "/c");
  env.remove("PYTHONPATH", "/a");
  EXPECT_EQ(env.get("PYTHONPATH"), "/a/c");
  env.remove("PYTHONPATH", "/a/c");
  EXPECT_EQ(env.get("PYTHONPATH"), std::nullopt);
  env.remove("PYTHONPATH", "/a");
  EXPECT_EQ(env.get("PYTHONPATH"), std::nullopt);
}

TEST(environment, pointers_end_with_null) {
  environment env{{"A=1", "B=2"}};
  auto const pointers = env.pointers();
  ASSERT_EQ(pointers.size(), 3U);
  EXPECT_STREQ(pointers[0], "A=1");
  EXPECT_STREQ(pointers[1], "B=2");
  EXPECT_EQ(pointers[2], nullptr);
}

}  // namespace
}  // namespace sluice::launcher
