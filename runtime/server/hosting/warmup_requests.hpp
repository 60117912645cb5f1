/// Requests out of the samples that a model's configuration has for its warm-up.
///
///   for (auto& request : warmup_requests(entry.warmup, entry.max_batch_size > 0)) {
///     host.submit(0, std::move(request), reply);
///   }
///
/// Random numbers are the same each time: reals from 0 up to 1, integers and booleans 0 or 1, so that they can be places in
/// most tables. Text is one letter.
#pragma once

#include <vector>

#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/warmup.hpp"

namespace sluice::server {

/// As many as the samples' counts say, in their order, for all outputs. With `has_batches` inputs get a dimension in front,
/// of a sample's `batch_size`. Throws `unavailable` if a file cannot be read, or has fewer bytes than a sample takes.
[[nodiscard]] std::vector<infer_request> warmup_requests(std::vector<warmup_sample> const& samples,
                                                         bool has_batches);

}  // namespace sluice::server
