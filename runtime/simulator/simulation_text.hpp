/// What simulations have found, as a table for people and as CSV for programs.
#pragma once

#include <string>
#include <vector>

#include "runtime/simulator/forecasts.hpp"
#include "runtime/simulator/simulation.hpp"

namespace sluice::simulator {

/// Of one policy.
struct simulation_row {
  std::string policy;
  simulation_outcome outcome;
  forecast before;
};

/// A line for each policy.
[[nodiscard]] std::string table_of(std::vector<simulation_row> const& rows);

/// A line for each policy with `all` for a model, and one for each of its models. Names that hold a comma or a quote are quoted.
[[nodiscard]] std::string csv_of(std::vector<simulation_row> const& rows,
                                 std::vector<std::string> const& models);

}  // namespace sluice::simulator
