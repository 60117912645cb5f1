#include "random_runs.hpp"

#include <cstdlib>
#include <iostream>

#include "tests/from_environment.hpp"

namespace sluice::memhandover::trials {

std::vector<std::uint64_t> seeds() {
  if (std::getenv("SLUICE_TEST_SEED") != nullptr) {
    return {from_environment("SLUICE_TEST_SEED", 1)};
  }
  auto const fresh = std::uint64_t{std::random_device{}()} + 1;
  std::cout << "a fresh seed; to repeat it alone, set SLUICE_TEST_SEED=" << fresh << std::endl;
  return {1, 2, fresh};
}

}  // namespace sluice::memhandover::trials
