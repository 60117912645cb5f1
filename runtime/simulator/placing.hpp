/// Which devices each model of a trace is on, by one of several rules.
///
/// | description | rule |
/// |---|---|
/// | `work` | by how much work a model's requests are, the most first, each to the device with the least; memory does not count |
/// | `round-robin`, `first-fit` | in the order of the trace's models, each to the next device, or the first, that has room |
/// | `attainment` | `scheduler::place_by_attainment`: several devices for a model where that brings more answers in time |
///
///   auto const models = placeable_models(requests, {.bytes = {4_GiB}, .latency = 200ms});
///   auto const found = place(requests, models, devices, parse_placing("attainment"), settings);
///   found.devices_of[0];   // where the first model is; nowhere: `left_out` says why
///
/// Rates and services are those of all of the trace: as if it had been known before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/trace.hpp"
#include "scheduler/placement.hpp"

namespace sluice::simulator {

enum class placing_rule : std::uint8_t { work, round_robin, first_fit, attainment };

/// Throws `invalid_argument` with what there is.
[[nodiscard]] placing_rule parse_placing(std::string const& description);

struct placeable_settings {
  std::vector<std::uint64_t> bytes;  ///< of each model; one: of all
  scheduler::seconds latency{0.0};
  scheduler::seconds idle_timeout{scheduler::forever};
  unsigned instances = 1;
  load_costs costs{};
};

[[nodiscard]] std::vector<scheduler::placeable_model> placeable_models(
    trace const& requests, placeable_settings const& settings);

[[nodiscard]] scheduler::model_placement place(
    trace const& requests, std::vector<scheduler::placeable_model> const& models,
    std::vector<scheduler::placement_device> const& devices, placing_rule rule,
    scheduler::placement_settings const& settings);

/// By work: a device for each model. `devices` is at least one.
[[nodiscard]] std::vector<unsigned> place_models(trace const& requests, unsigned devices);

}  // namespace sluice::simulator
