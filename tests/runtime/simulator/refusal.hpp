/// With what something is refused.
#pragma once

#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::simulator {

/// "was taken": it is not.
template <typename Attempt>
std::string refusal_of(Attempt const& attempt) {
  try {
    attempt();
  } catch (error const& wrong) {
    return wrong.what();
  }
  return "was taken";
}

}  // namespace sluice::simulator
