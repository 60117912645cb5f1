/// Makes traces by a description: a process's name and its parameters, `poisson:rate=2` or `mmpp:rates=18/2,switches=0.1/0.1`.
///
/// | process | parameters | arrivals |
/// |---|---|---|
/// | `poisson` | `rate` | that do not depend on each other |
/// | `mmpp` | `rates`, `switches` | Poisson at one of two rates; switches per second out of either |
/// | `hawkes` | `rate`, `branching`, `decay` | each brings `branching` more on average, soon: their rate falls with `decay` per second |
/// | `lognormal` | `rate`, `scv` | gaps with a log-normal distribution of that squared coefficient of variation |
/// | `diurnal` | `rate`, `swing`, `period` | Poisson whose rate goes up and down as a sine by `swing` (0..1) in `period` seconds |
/// | `periodic` | `period`, `jitter`, `bunch`, `spread`, `missed` | each model's, by a timer (below) |
///
/// `rate` is the mean of all models together, requests a second. `zipf=1.05` in any but `periodic` is the exponent by which requests go to
/// models; without it all have the same share.
///
/// `periodic` brings each model `bunch` requests (1) each `period` seconds, from a phase of its own on: the first of them up to `jitter`
/// seconds (0) earlier or later, the others within `spread` seconds (0) behind it; a share `missed` (0) of the bunches does not come.
///
///   auto const made = generate("hawkes:rate=2,branching=0.5,decay=1", {.length_s = 600.0});
///   made.requests.size();
///
/// What cannot be understood throws `invalid_argument`, and says what there is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/simulator/trace.hpp"
#include "scheduler/bursts.hpp"

namespace sluice::simulator {

struct generated_requests {
  double length_s = 3600.0;
  std::uint32_t models = 1;
  double service_s = 0.05;
  double service_scv = 1.0;
  std::uint64_t seed = 1;
};

/// Whether it begins with a process's name and a colon; else it is a file's.
[[nodiscard]] bool names_process(std::string const& text);

[[nodiscard]] trace generate(std::string const& description, generated_requests const& of);

/// Of a stream for which there is an exact formula: its two rates; both the same for `poisson`.
[[nodiscard]] std::optional<scheduler::switching_poisson> switching_of(
    std::string const& description);

}  // namespace sluice::simulator
