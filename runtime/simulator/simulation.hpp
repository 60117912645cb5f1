/// Runs a trace through devices, event by event, under one policy of keeping models.
///
/// A device computes up to `parallel` requests at once, of each model as many as it has instances, in the order of their arrival
/// among models that are there; of n at once each takes slowdown[n − 1] times as long. A request for a model that is not there
/// begins its load, which takes none of the computing; other models' requests go before it. Where a device has not the memory for it, idle
/// models leave, those first whose absence costs least as its policy says; as long as they are not enough the load waits for its turn.
///
///   states of a model:  cold ──► loading ──► warm ──► releasing ──► cold
///
///   auto const result =
///       simulate(requests, models, *policy, {.parallel = 2, .slowdown = {1.0, 1.3}});
///   result.in_time();   // share of requests answered within their model's latency
///
/// All that is random comes from the seed. One thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/trace.hpp"

namespace sluice::simulator {

struct simulation_settings {
  unsigned devices = 1;
  unsigned parallel = 1;
  std::vector<double> slowdown{};  ///< the last holds for more at once; empty: none
  load_costs costs{};
  std::vector<std::uint64_t>
      memory_bytes{};         ///< of each device; the last holds for more; empty: enough
  double release_s = 0.0;     ///< a release takes so long, and cannot be taken back
  double count_from_s = 0.0;  ///< what arrives before is computed, and counts for nothing
  unsigned retries = 0;       ///< who is refused sends the same again up to so many times
  std::uint64_t seed = 1;
  std::function<void(double share)> progress{};  ///< called now and then
};

/// Times with an error of two in a hundred, as many as there may be.
class time_histogram {
 public:
  void add(double seconds);
  /// 0 if there are none.
  [[nodiscard]] double quantile(double share) const;

 private:
  static constexpr std::size_t bins = 1536;
  std::array<std::uint64_t, bins> counts_{};
  std::uint64_t all_ = 0;
};

/// Of one model.
struct model_outcome {
  std::uint64_t requests = 0;  ///< those refused among them
  std::uint64_t refused = 0;   ///< as often as their clients tried
  std::uint64_t answered = 0;
  std::uint64_t within = 0;
  std::uint64_t cold = 0;  ///< came when it was not there
  std::uint64_t loads = 0;
  double waits_s =
      0.0;  ///< sum over answers; a wait is a response without what it would have taken alone
  double responses_s = 0.0;  ///< the same of responses
  double released_s = 0.0;   ///< a second in which a part is there counts for the rest
  double predicted = 0.0;    ///< sum over requests of what the policy predicted then
  std::uint64_t predictions = 0;

  model_outcome& operator+=(model_outcome const& more);
};

struct simulation_outcome {
  std::vector<model_outcome> models;
  time_histogram responses;
  double length_s = 0.0;         ///< that was counted
  double released_byte_s = 0.0;  ///< what is kept free is taken off
  double deployed_byte_s = 0.0;  ///< all models' bytes, over all the time

  [[nodiscard]] model_outcome all() const;
  /// Of all requests, those refused among them.
  [[nodiscard]] double in_time() const;
  [[nodiscard]] double released_share() const;
};

/// Throws `invalid_argument` for settings without meaning.
[[nodiscard]] simulation_outcome simulate(trace const& requests,
                                          std::vector<simulated_model> const& models,
                                          keeping& policy, simulation_settings const& settings);

}  // namespace sluice::simulator
