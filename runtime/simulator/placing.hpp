/// Which device each model of a trace is on: by how much work its requests are, the most first, each to the device with the least.
#pragma once

#include <vector>

#include "runtime/simulator/trace.hpp"

namespace sluice::simulator {

/// A device for each model. `devices` is at least one.
[[nodiscard]] std::vector<unsigned> place_models(trace const& requests, unsigned devices);

}  // namespace sluice::simulator
