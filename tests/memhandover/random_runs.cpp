#include "random_runs.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>

namespace sluice::memhandover::trials {

std::uint64_t count_from(char const* variable, std::uint64_t otherwise) {
  char const* text = std::getenv(variable);
  if (text == nullptr) {
    return otherwise;
  }
  std::uint64_t number = 0;
  auto const* end = text + std::strlen(text);
  auto const parsed = std::from_chars(text, end, number);
  if (parsed.ec != std::errc{} || parsed.ptr != end || number == 0) {
    throw std::invalid_argument{std::string{variable} + " is \"" + text +
                                "\", which is no positive number"};
  }
  return number;
}

std::vector<std::uint64_t> seeds() {
  if (std::getenv("SLUICE_TEST_SEED") != nullptr) {
    return {count_from("SLUICE_TEST_SEED", 1)};
  }
  auto const fresh = std::uint64_t{std::random_device{}()} + 1;
  std::cout << "a fresh seed; to repeat it alone, set SLUICE_TEST_SEED=" << fresh << std::endl;
  return {1, 2, fresh};
}

}  // namespace sluice::memhandover::trials
