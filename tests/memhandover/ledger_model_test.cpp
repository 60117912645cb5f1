/// SLUICE_TEST_OPERATIONS sets how many operations there are.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <iostream>

#include "ledger_in_step.hpp"
#include "tests/from_environment.hpp"

namespace sluice::memhandover::trials {
namespace {

TEST(ledger_model, agrees_with_the_ledger_after_every_operation_and_every_death_of_the_writer) {
  constexpr std::array<std::uint32_t, 3> sizes{40, 7, 64};
  auto const all = seeds();
  auto const operations = from_environment("SLUICE_TEST_OPERATIONS", 200'000) / all.size();
  auto const start = std::chrono::steady_clock::now();
  std::uint64_t deaths = 0;
  for (auto const seed : all) {
    ledger_in_step both{seed, sizes.at(seed % sizes.size())};
    std::uint64_t operation = 0;
    try {
      for (; operation < operations; ++operation) {
        both.step();
      }
      both.finish();
    } catch (difference const& what) {
      FAIL() << what.what() << ", operation " << operation << " of SLUICE_TEST_SEED=" << seed;
    }
    deaths += both.deaths();
  }
  std::chrono::duration<double> const took = std::chrono::steady_clock::now() - start;
  std::cout << operations * all.size() << " operations and " << deaths << " deaths in "
            << took.count() << " s\n";
  EXPECT_GT(deaths, operations * all.size() / 1000);
}

}  // namespace
}  // namespace sluice::memhandover::trials
