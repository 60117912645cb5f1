/// What the scheduler is told of a model or an engine, as the policy has it.
#pragma once

#include <chrono>

#include "runtime/policy/policy.hpp"
#include "scheduler/model_controller.hpp"

namespace sluice::server {

[[nodiscard]] inline scheduler::idle_limits idle_limits_of(policy::warm_policy const& warm) {
  switch (warm.mode) {
    case policy::warm_mode::automatic:
      return {warm.min_idle, warm.max_idle};
    case policy::warm_mode::fixed:
      return {warm.max_idle, warm.max_idle};
    case policy::warm_mode::always:
      break;
  }
  // Predicted as what it is; the host leaves it alone.
  return {std::chrono::hours{24 * 365}, scheduler::forever};
}

/// Its promise and the limits of its idle timeout; all else as the scheduler has it.
[[nodiscard]] inline scheduler::model_settings scheduling_of(policy::model_policy const& wanted) {
  return {.goal = {.percentile = wanted.slo.percentile,
                   .latency = wanted.slo.latency,
                   .attainment = wanted.slo.attainment,
                   .window = wanted.slo.window},
          .limits = idle_limits_of(wanted.warm)};
}

}  // namespace sluice::server
