/// What of the models of a device is in force in place of what each has chosen for itself, as long as that is together more memory
/// than there is (joint_choice.hpp). Whoever decides for a device has one, and asks it after each round of decisions.
///
///   joint_keeping shared;
///   auto const in_force = shared.share({{&first.warm, 9e9}, {&second.warm, 6e9}}, 12e9);
///   idle_timer = in_force[0] ? in_force[0]->idle_timeout : first.warm.chosen.idle_timeout;
///
/// A model that misses its promise with what there is for it stays until somebody needs its memory, or its `max_idle` is over: a shorter
/// timeout would give that away for nothing. Reads no clock; not thread-safe.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/warm_policy.hpp"

namespace sluice::scheduler {

class joint_keeping {
 public:
  struct model {
    warm_decision const* decision =
        nullptr;  ///< for itself alone; null, or without candidates: it takes no part
    double weight_bytes = 0.0;
    seconds max_idle = forever;  ///< no longer than that it stays idle
  };

  /// Of each model, in their order: what is in force, or nothing where its own choice is. `memory_bytes`: what they have together at
  /// most. What was in force the last time stays as `choose_together` says. Throws what that throws.
  [[nodiscard]] std::vector<std::optional<prediction>> share(std::span<model const> models,
                                                             double memory_bytes);
  [[nodiscard]] std::vector<std::optional<prediction>> share(std::initializer_list<model> models,
                                                             double memory_bytes) {
    return share(std::span{models.begin(), models.size()}, memory_bytes);
  }

  /// On average, by what each had chosen for itself the last time.
  [[nodiscard]] double wanted_bytes() const noexcept { return wanted_bytes_; }

 private:
  double wanted_bytes_ = 0.0;
  std::vector<std::size_t> members_{};  ///< who takes part
  std::vector<std::size_t> chosen_{};   ///< of those, while there is not enough
};

}  // namespace sluice::scheduler
