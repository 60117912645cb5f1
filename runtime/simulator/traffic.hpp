/// What a trace asks of each of its models on average, and what loads take, as the formulas of the scheduler want to know it.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/trace.hpp"
#include "scheduler/distribution.hpp"

namespace sluice::simulator {

/// Of one model.
struct traffic_seen {
  double rate_per_s = 0.0;
  double gap_scv = 1.0;
  scheduler::distribution service;
};

/// Over all of the trace; of long ones services are every so many.
[[nodiscard]] std::vector<traffic_seen> traffic_of(trace const& requests);

[[nodiscard]] scheduler::distribution load_times(load_costs const& costs, std::uint64_t bytes);

}  // namespace sluice::simulator
