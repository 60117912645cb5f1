#pragma once

#include <cstdlib>
#include <string>

namespace sluice {

/// What an environment variable is set to; empty if it is not.
[[nodiscard]] inline std::string environment(char const* name) {
  char const* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace sluice
