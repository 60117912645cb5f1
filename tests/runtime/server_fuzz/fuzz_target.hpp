/// What is fuzzed: a part of the server that reads what strangers write. Each `*_target.cpp` is one, and is linked with the driver that
/// calls it (driver.cpp).
///
/// `run_one` ends the process with a message where something does not hold; the sanitizers do where memory is touched that should not be.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::server::fuzzing {

/// Inputs to begin with, one of each kind that docs/protocol.md has.
[[nodiscard]] std::vector<std::string> seeds();

/// Deterministic, with nothing left of it for the next input.
void run_one(std::string_view input);

inline void require(bool holds, std::string_view what, std::string_view of = {}) {
  if (holds) return;
  std::cerr << "does not hold: " << what << '\n' << of << std::endl;
  std::abort();
}

}  // namespace sluice::server::fuzzing
