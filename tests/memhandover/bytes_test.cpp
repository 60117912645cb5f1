#include "memhandover/base/bytes.hpp"

#include <gtest/gtest.h>

namespace {

using namespace sluice::literals;

TEST(bytes, are_written_in_the_largest_unit_that_keeps_them_above_one) {
  EXPECT_EQ(sluice::format_bytes(0), "0 B");
  EXPECT_EQ(sluice::format_bytes(1023), "1023 B");
  EXPECT_EQ(sluice::format_bytes(64_MiB), "64 MiB");
  EXPECT_EQ(sluice::format_bytes(1_GiB + 512_MiB), "1.5 GiB");
}

}  // namespace
