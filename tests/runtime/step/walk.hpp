#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "tests/from_environment.hpp"

namespace sluice::test {

/// Which call of a function, or which allocation, fails next: each in turn, until a run in which none was left to fail. With
/// SLUICE_TEST_STRIDE=n about one in n, at random: for builds in which each run takes long.
class walk {
 public:
  /// More than any function has in one life; walks end long before.
  static constexpr unsigned too_many = 2000;

  walk() {
    if (stride_ > 1) {
      auto const seed = from_environment("SLUICE_TEST_SEED", std::random_device{}());
      std::printf("seed %llu, one in %u\n", static_cast<unsigned long long>(seed), stride_);
      random_.seed(static_cast<unsigned>(seed));
    }
  }
  /// How many come before it.
  [[nodiscard]] unsigned place() const { return place_; }
  [[nodiscard]] bool goes_on() const { return place_ < too_many && !testing::Test::HasFailure(); }
  [[nodiscard]] unsigned steps() const { return steps_; }
  /// None was left out.
  [[nodiscard]] bool is_whole() const { return steps_ == place_; }
  void step() {
    place_ += stride_ > 1 ? 1 + static_cast<unsigned>(random_() % (2 * stride_ - 1)) : 1;
    ++steps_;
  }

 private:
  unsigned stride_ = static_cast<unsigned>(from_environment("SLUICE_TEST_STRIDE", 1));
  unsigned place_ = 0;
  unsigned steps_ = 0;
  std::mt19937 random_;
};

}  // namespace sluice::test
