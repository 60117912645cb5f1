/// What a piece of code throws, as a value to look at.
#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "memhandover/base/error.hpp"

namespace sluice {

inline void PrintTo(error_kind kind, std::ostream* out) {
  *out << to_string(kind);
}

template <typename Work>
std::optional<error> thrown_by(Work&& work) {
  try {
    std::forward<Work>(work)();
  } catch (error const& failure) {
    return failure;
  }
  return std::nullopt;
}

}  // namespace sluice
