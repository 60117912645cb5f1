/// What the status says of a host (docs/operations.md).
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/server/hosting/model_host.hpp"

namespace sluice::server {

[[nodiscard]] nlohmann::json describe(host_snapshot const& now);

}  // namespace sluice::server
