/// What a server knows of itself, as the metrics that Prometheus reads: Triton's (nv_inference_…) and our own (sluice_…).
/// docs/operations.md lists them.
///
///   metrics_of({account.statistics()}, executor.status(), pool.look(1s));
///
/// Nothing is counted for them alone: they show what the status and the statistics have, and leave out what is not known.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/server/model_account.hpp"

namespace sluice::server {

/// `status` is a service's, `pool` what the broker says of its pool.
[[nodiscard]] std::string metrics_of(std::vector<model_statistics> const& models,
                                     nlohmann::json const& status,
                                     std::optional<nlohmann::json> const& pool);

}  // namespace sluice::server
