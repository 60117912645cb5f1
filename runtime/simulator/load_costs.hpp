/// What a cold start takes: memory changes hands if it is not free already, and the weights are copied.
///
/// Costs come from the benchmarks' records, so that what is simulated has been measured:
///
///   auto const costs = costs_of_records("benchmarks/results", "h200");
///   costs.bytes_per_s;          // of parking-h200.json, copies into the device
///   costs.handover.draw(random);   // of handover-h200.json, latency_us
///
/// One without records is made of numbers.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "runtime/simulator/draws.hpp"

namespace sluice::simulator {

/// A distribution by its quantiles, with straight lines between.
class measured_time {
 public:
  /// A constant.
  explicit measured_time(double constant_s = 0.0) : at_{{{1.0, constant_s}}} {}
  /// Throws `invalid_argument` unless they rise.
  measured_time(double p50_s, double p90_s, double p99_s, double max_s);

  [[nodiscard]] double draw(draws& random) const;
  [[nodiscard]] double mean() const;

 private:
  struct point {
    double share;
    double seconds;
  };
  std::array<point, 4> at_;
  std::size_t points_ = 1;
};

struct load_costs {
  measured_time handover{};
  double bytes_per_s = 20.0 * 1024 * 1024 * 1024;
  double fixed_s = 0.0;  ///< beside; gamma distributed
  double fixed_scv = 0.0;

  [[nodiscard]] double mean_s(std::uint64_t bytes) const;
};

/// Throws `not_found` where the folder has no record of that machine, and `invalid_argument` for one that cannot be understood, with
/// its name.
[[nodiscard]] load_costs costs_of_records(std::string const& folder, std::string const& machine);

}  // namespace sluice::simulator
