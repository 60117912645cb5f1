/// How a model's requests are queued and put together, as its configuration says.
///
/// Source: Triton, common/protobuf/model_config.proto, ModelDynamicBatching and ModelQueuePolicy.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <vector>

namespace sluice::server {

/// Of the requests of one priority.
struct queue_policy {
  enum class timeout_action { reject, delay };
  timeout_action on_timeout =
      timeout_action::reject;                    ///< `delay`: behind all that have not timed out
  std::chrono::microseconds default_timeout{0};  ///< for its computation to begin; 0: none
  bool allow_timeout_override =
      false;  ///< a request's own `timeout`, where it is shorter, in place of it
  std::uint32_t max_queue_size = 0;  ///< waiting requests of that priority; 0: no bound of its own

  bool operator==(queue_policy const&) const = default;
};

struct batching_rules {
  /// Samples that one computation may have: `max_batch_size`; 0: the inputs have no batch dimension.
  std::int64_t max_batch_size = 0;
  bool is_dynamic = false;                      ///< requests may be computed together
  std::vector<std::int64_t> preferred_sizes{};  ///< ascending; none: `max_batch_size`
  /// How long a request may wait for others at most.
  std::chrono::microseconds max_queue_delay{0};
  bool preserve_ordering =
      false;  ///< within a priority, answers leave in the order in which requests came
  std::uint32_t priority_levels = 0;  ///< 1 is the most urgent; 0: there are no priorities
  std::uint32_t default_priority = 0;
  queue_policy default_policy{};
  std::map<std::uint32_t, queue_policy>
      policies{};  ///< by priority, in the place of `default_policy`

  bool operator==(batching_rules const&) const = default;
};

}  // namespace sluice::server
