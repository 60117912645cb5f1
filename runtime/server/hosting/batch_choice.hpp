/// Which of the requests that wait for a model are computed next, as one batch, and until when others are waited for.
///
/// The first of the line is always among them, so that nobody is passed over for ever. Others join it that have the same
/// shape, as long as the batch stays within its limit. A preferred size is taken at once, the largest that there is; so is a
/// batch that nobody fits into any more. Else others are waited for, until the one that came first has waited for
/// `max_queue_delay`, but no longer than the tightest deadline of the batch allows: what the computation takes is left, and
/// at least half of each request's time.
///
///   batching_rules const rules{.max_batch_size = 8, .is_dynamic = true, .max_queue_delay = 2ms};
///   auto const next = choose_batch(line, rules, now, 5ms);
///   if (next.taken.empty()) {
///     // … look again at *next.again_at, or when another one comes …
///   }
///
/// Pure. Source of the rules: Triton Inference Server, docs/user_guide/batcher.md; it does not look at deadlines.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/server/inference/batching.hpp"

namespace sluice::server {

struct waiting_request {
  using time_point = std::chrono::steady_clock::time_point;
  std::int64_t samples = 1;
  std::string_view shape;  ///< what has another one cannot be in the same batch
  bool is_alone = false;   ///< it may not be in a batch with others
  std::uint32_t priority = 0;
  bool is_late = false;  ///< goes behind those that are not
  time_point arrival, deadline;
};

struct batch_choice {
  std::vector<std::size_t> taken;  ///< places in the line, in the order in which they are served
  std::optional<waiting_request::time_point> again_at;  ///< if none is taken although some wait
};

/// `line` is in order of arrival. `computation` is what one is expected to take at most. Without `is_dynamic` each is
/// computed by itself.
[[nodiscard]] batch_choice choose_batch(std::span<waiting_request const> line,
                                        batching_rules const& rules,
                                        waiting_request::time_point now,
                                        std::chrono::nanoseconds computation);

}  // namespace sluice::server
