#include "nccl_shim/agreement/silences.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Two ranks that count once a second, looked at by the first.
class silences_test : public ::testing::Test {
 protected:
  std::vector<unsigned> look(std::string const& first, std::string const& second,
                             std::chrono::nanoseconds after = 1s) {
    now_ += after.count();
    std::vector<beat> counts(2, beat{});
    std::copy(first.begin(), first.end(), counts[0].begin());
    std::copy(second.begin(), second.end(), counts[1].begin());
    return of_.look(counts, now_);
  }
  /// The first goes on counting, the second does not. Those that are silent in the last look.
  std::vector<unsigned> looks(int count) {
    std::vector<unsigned> found;
    for (int i = 0; i < count; ++i) {
      found = look(std::to_string(++counted_), "7");
    }
    return found;
  }

 private:
  std::int64_t now_ = 0;
  int counted_ = 0;
  silences of_{2, 10s, 0};
};

TEST_F(silences_test, who_does_not_count_for_as_long_as_the_patience_is_silent) {
  EXPECT_THAT(looks(11), IsEmpty());
  EXPECT_THAT(looks(1), ElementsAre(1));
}

TEST_F(silences_test, who_counts_in_between_is_not) {
  EXPECT_THAT(looks(11), IsEmpty());
  EXPECT_THAT(look("12", "8"), IsEmpty());
  EXPECT_THAT(looks(11), IsEmpty());
}

TEST_F(silences_test, who_has_left_is_not_missed) {
  for (int i = 0; i < 30; ++i) {
    EXPECT_THAT(look(std::to_string(i), "left"), IsEmpty());
  }
}

TEST_F(silences_test, while_nobody_could_look_nobody_was_silent) {
  EXPECT_THAT(looks(5), IsEmpty());
  EXPECT_THAT(look("6", "7", 30s), IsEmpty());  // the other's count may be under way
  EXPECT_THAT(look("7", "8"), IsEmpty());
}

TEST_F(silences_test, whoever_stays_silent_after_that_is_found) {
  EXPECT_THAT(looks(1), IsEmpty());
  EXPECT_THAT(look("2", "7", 30s), IsEmpty());
  EXPECT_THAT(looks(8), IsEmpty());
  EXPECT_THAT(looks(1), ElementsAre(1));
}

}  // namespace
}  // namespace sluice::nccl_shim
