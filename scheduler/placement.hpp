/// Which models are on which devices: by the share of requests in time that is predicted, or by simple rules to compare with.
///
/// A device holds weights up to its memory, and computes what its models ask for in the order of arrival. A model may be on several
/// devices; each replica then gets the same part of its requests, drawn by chance. What a device answers in time follows from the
/// joint prediction of its models (attainment.hpp), so that a step changes the predictions of few devices.
///
///   std::vector<placeable_model> const models{
///       {.bytes = 4_GiB, .arrivals_per_s = 20.0, .service = small, .latency = 100ms},
///       {.bytes = 30_GiB, .arrivals_per_s = 1.0, .service = large, .latency = 2s}};
///   auto const found = place_by_attainment(models, devices, {});
///   found.devices_of[0];   // its devices, in rising order; none: `left_out` says why
///
/// `place_by_attainment` begins with empty devices. Each step adds the replica with which the share in time rises most; of equals the
/// one with which more is answered at all, on the device where less memory remains, of the first model, on the first device. A model
/// that overloads a device is added to as many at once as it needs. Where no step gains, each model is taken away in turn, those with
/// the most requests first, and the steps go on without it before it may come back: what is better then is kept. All that is done a
/// second time by what a step gains for each byte, and the better of the two is taken.
///
/// Several computations at once count as one server of their joint speed. Poisson arrivals, as in all that is predicted.
///
/// Pure functions of any thread, the same for the same inputs. They throw `std::invalid_argument` for what has no meaning.
/// Source: greedy selection of AlpaServe, Li and others, OSDI 2023, section 4.2, with a beam of one and a prediction in place of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "scheduler/distribution.hpp"
#include "scheduler/shared_executors.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

struct placeable_model {
  std::uint64_t bytes = 0;
  double arrivals_per_s = 0.0;
  distribution service{};         ///< alone
  distribution load{};            ///< of a cold start
  seconds latency{0.0};           ///< in which a request is to be answered
  seconds idle_timeout{forever};  ///< idle for so long it is released
  unsigned instances = 1;         ///< so many of its requests at once, on each device
};

struct placement_device {
  std::uint64_t bytes = 0;
};

struct placement_settings {
  shared_executors executors{};  ///< of each device
  double least_gain =
      1e-4;  ///< of the share in time, for each device of a model beyond its first; in [0, 1)
};

struct model_placement {
  enum class reason : std::uint8_t {
    too_large,  ///< no device has so much memory
    no_room,    ///< others have it
    no_gain     ///< there is room, but others would lose more than it gains
  };
  struct left_out_model {
    std::size_t model = 0;
    reason why = reason::no_room;
    std::uint64_t most_bytes = 0;  ///< of the largest device; else free on the emptiest
    std::size_t device = 0;        ///< which that is
  };

  std::vector<std::vector<std::size_t>> devices_of;  ///< of each model, in rising order
  std::vector<left_out_model> left_out{};            ///< by model
};

[[nodiscard]] model_placement place_by_attainment(std::span<placeable_model const> models,
                                                  std::span<placement_device const> devices,
                                                  placement_settings const& settings);

/// One after the other, each on the next device that has room.
[[nodiscard]] model_placement place_in_rotation(std::span<placeable_model const> models,
                                                std::span<placement_device const> devices);

/// One after the other, each on the first device that has room.
[[nodiscard]] model_placement place_first_fit(std::span<placeable_model const> models,
                                              std::span<placement_device const> devices);

/// What is predicted of a placement.
struct placement_prediction {
  struct of_device {
    std::uint64_t bytes = 0;   ///< of its models' weights
    double utilisation = 0.0;  ///< may be above one
    double share_within = 1.0;
  };
  double share_within = 1.0;  ///< of all requests; those of models that are left out are not
  std::vector<double> share_within_of;
  std::vector<of_device> devices;
};
[[nodiscard]] placement_prediction predict_placement(std::span<placeable_model const> models,
                                                     std::span<placement_device const> devices,
                                                     model_placement const& of,
                                                     placement_settings const& settings);

}  // namespace sluice::scheduler
