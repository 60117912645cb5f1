/// What the status says of a host (docs/operations.md).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/server/hosting/model_host.hpp"

namespace sluice::server {

[[nodiscard]] nlohmann::json describe(host_snapshot const& now);
/// What would keep a promise that cannot be kept, in words.
[[nodiscard]] std::string remedy_text(scheduler::warm_decision const& decision);

}  // namespace sluice::server
