/// A trace as it comes to replicas of models on devices, and what became of it put together by models again.
///
/// Each request goes to one of its model's replicas, drawn by chance, all alike; what is for a model that is on no device goes nowhere,
/// and counts as refused.
///
///   auto const there = spread(std::move(requests), found.devices_of, {.seed = 1});
///   auto const replicas = replicas_of(models, there, goal);
///   auto const seen = gathered(simulate(there.requests, replicas, *policy, settings), there);
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/simulator/simulation.hpp"
#include "runtime/simulator/trace.hpp"
#include "scheduler/placement.hpp"

namespace sluice::simulator {

struct spread_settings {
  double count_from_s = 0.0;  ///< as in `simulation_settings`
  std::uint64_t seed = 1;
};

struct spread_trace {
  trace requests;                       ///< its models are replicas
  std::vector<std::uint32_t> model_of;  ///< of each replica
  std::vector<unsigned> device_of;
  std::vector<std::uint64_t> nowhere;  ///< of each model: requests that count and went nowhere
  double share_somewhere = 1.0;        ///< of those that count
};

/// `devices_of`: of each model, any number of them.
[[nodiscard]] spread_trace spread(trace requests,
                                  std::vector<std::vector<std::size_t>> const& devices_of,
                                  spread_settings const& settings);

/// As the models are, each where it is; `goal` is all models'.
[[nodiscard]] std::vector<simulated_model> replicas_of(
    std::vector<scheduler::placeable_model> const& models, spread_trace const& there,
    scheduler::objective const& goal);

/// By models. What a model released is the mean of its replicas; of requests that went nowhere it is predicted that they are late, if
/// anything is.
[[nodiscard]] simulation_outcome gathered(simulation_outcome of_replicas, spread_trace const& from);

}  // namespace sluice::simulator
