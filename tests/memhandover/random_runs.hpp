/// How much a random test does, and from which seeds.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace sluice::memhandover::trials {

/// $SLUICE_TEST_SEED alone if it is set; else a few fixed seeds and a fresh one, which is printed
/// so that a failure can be repeated.
[[nodiscard]] std::vector<std::uint64_t> seeds();

/// A number below `bound`, which is positive. Not exactly uniform, but the same everywhere.
template <typename Random>
[[nodiscard]] std::uint32_t below(Random& random, std::uint64_t bound) {
  return static_cast<std::uint32_t>(random() % bound);
}

}  // namespace sluice::memhandover::trials
