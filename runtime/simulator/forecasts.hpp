/// What formulas say beforehand of a simulation, where there is one: the share of requests in time, and the mean wait.
///
/// | policy | device | share in time | mean wait |
/// |---|---|---|---|
/// | never released | one model, one at a time | M/G/1 | MMPP/M/1 if the stream is one and services are exponential, else by the spread of gaps |
/// | never released | several models in turn | classes on one server | the same |
/// | never released | one model, several at once | – | birth and death |
/// | fixed timeout | one model, one at a time | M/G/1 with set-up | the same |
/// | Sirius | one at a time | its chain, each model alone | the same |
///
/// Rates and services are the trace's own, over all of it; arrivals are taken as Poisson where nothing else is said.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/simulation.hpp"
#include "runtime/simulator/trace.hpp"

namespace sluice::simulator {

struct forecast {
  std::optional<double> in_time{};
  std::optional<double> mean_wait_s{};
  std::string by{};  ///< the formula's name; empty: there is none
};

/// `stream` is the trace's description if it was generated.
[[nodiscard]] forecast forecast_of(trace const& requests,
                                   std::vector<simulated_model> const& models,
                                   std::string const& policy, std::string const& stream,
                                   simulation_settings const& settings);

}  // namespace sluice::simulator
