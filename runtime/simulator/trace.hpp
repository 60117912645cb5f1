/// What comes in a simulation: requests in the order of their arrival, each with its model and how long it takes alone.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace sluice::simulator {

/// A time, in seconds, that does not come.
inline constexpr double never = std::numeric_limits<double>::infinity();

struct arriving {
  double at_s = 0.0;  ///< since the trace's beginning
  double service_s = 0.0;
  std::uint32_t model = 0;
};

struct trace {
  std::vector<std::string> models;  ///< names, by number
  std::vector<arriving> requests;   ///< by time
  double length_s = 0.0;
};

}  // namespace sluice::simulator
