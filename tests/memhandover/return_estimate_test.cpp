#include "memhandover/parking/return_estimate.hpp"

#include <gtest/gtest.h>

namespace sluice::memhandover {
namespace {

using namespace std::chrono_literals;

TEST(return_estimate, is_what_going_took_before_anything_has_come_back) {
  return_estimate coming;
  EXPECT_EQ(coming.expected(4, 0), 0s);
  coming.went(3s, {1500ms, 2});
  EXPECT_EQ(coming.expected(8, 2), 3s);
}

TEST(return_estimate, is_the_time_of_each_chunk_and_of_each_that_is_read) {
  return_estimate coming;
  coming.went(3s, {1500ms, 2});
  coming.came(2s, 8, {1200ms, 2});
  EXPECT_EQ(coming.expected(4, 0), 400ms);
  EXPECT_EQ(coming.expected(4, 3), 400ms + 1800ms);
}

TEST(return_estimate, takes_what_writing_took_for_what_was_never_read) {
  return_estimate coming;
  coming.went(100ms, {});
  coming.came(80ms, 8, {});
  EXPECT_EQ(coming.expected(8, 0), 80ms);
  coming.went(2s, {1900ms, 4});
  EXPECT_EQ(coming.expected(8, 4), 80ms + 1900ms) << "the last return was out of memory alone";
  coming.came(1080ms, 8, {1s, 4});
  EXPECT_EQ(coming.expected(8, 4), 1080ms);
  coming.came(80ms, 8, {});
  EXPECT_EQ(coming.expected(8, 4), 1080ms) << "what was learned of the disk stays";
}

TEST(return_estimate, of_a_return_that_was_all_reading_is_known_as_well) {
  return_estimate coming;
  coming.came(1s, 2, {1s, 2});
  EXPECT_EQ(coming.expected(2, 2), 1s + 2ns);
  coming.came(1s, 0, {});
  EXPECT_EQ(coming.expected(1, 0), 1s) << "nothing came, and that is counted as one";
}

}  // namespace
}  // namespace sluice::memhandover
