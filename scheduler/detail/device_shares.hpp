/// What a device answers in time of the requests to those models that are on it, for many sets of models one after the other.
///
/// The same prediction as that of `attainment_model` beside `predict_together`, for one computation at a time. What depends on one
/// model alone is kept, so that a set of n models costs a recursion for each latency among them and n sums. Several computations at
/// once count as one server of their joint speed. One thread at a time.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/detail/time_grid.hpp"
#include "scheduler/placement.hpp"

namespace sluice::scheduler::detail {

class device_shares {
 public:
  /// Throws `std::invalid_argument` with what a model or the executors must be. `models` has to live as long.
  device_shares(std::span<placeable_model const> models, shared_executors const& executors);

  /// Some of a model's requests.
  struct part {
    std::size_t model = 0;
    double arrivals_per_s = 0.0;
  };
  struct answers {
    double in_time_per_s = 0.0;
    double per_s = 0.0;  ///< fewer than what comes if the device is overloaded
    double utilisation = 0.0;
  };
  /// `shares`: set to the share in time of each part, if there is somebody who wants it.
  [[nodiscard]] answers of(std::span<part const> parts, std::vector<double>* shares = nullptr);

 private:
  struct own_times {
    grid_masses residual;  ///< of its service, as one server of the joint speed would have it
    grid_masses within;    ///< P(service ≤ latency − grid point)
    grid_masses loading;
    grid_masses behind_load;  ///< rest of a load in progress, and the service of who caused it
  };
  [[nodiscard]] double slowdown(std::size_t at_once) const;
  [[nodiscard]] double speed_of(std::span<part const> parts) const;
  [[nodiscard]] grid_masses const& residual(std::size_t model, std::size_t latency, double speed);
  [[nodiscard]] own_times const& times_of(std::size_t model);
  [[nodiscard]] double step_s(std::size_t latency) const;
  [[nodiscard]] double share_of_part(part const& it, grid_masses const& waits, double utilisation,
                                     double mean_wait_s, bool is_alone);

  std::span<placeable_model const> models_;
  shared_executors executors_;
  std::vector<double> latencies_;  ///< each once
  std::vector<std::size_t> latency_of_;
  std::vector<own_times> times_;
  std::map<std::pair<std::pair<std::size_t, std::size_t>, double>, grid_masses> residuals_;
};

}  // namespace sluice::scheduler::detail
