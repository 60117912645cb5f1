/// Which model is where, as a table for people and as CSV for programs.
#pragma once

#include <string>
#include <vector>

#include "scheduler/placement.hpp"

namespace sluice::simulator {

struct placed_models {
  std::vector<std::string> const& names;
  std::vector<scheduler::placeable_model> const& models;
  std::vector<scheduler::placement_device> const& devices;
  scheduler::model_placement const& found;
  scheduler::placement_prediction const& predicted;
};

/// A line for each device, and one for each model that is on none, with what it lacks; of many the first few.
[[nodiscard]] std::string table_of(placed_models const& those);

/// A line for each replica, and one without a device for each model that is on none.
[[nodiscard]] std::string csv_of(placed_models const& those);

/// Why a model is on no device, with the numbers.
[[nodiscard]] std::string why_left_out(placed_models const& those,
                                       scheduler::model_placement::left_out_model const& which);

}  // namespace sluice::simulator
