/// What a ledger says, as the JSON that `sluice status` prints. docs/operations.md names the
/// fields.
#pragma once

#include <nlohmann/json.hpp>

#include "memhandover/ledger.hpp"

namespace sluice::memhandover {

[[nodiscard]] nlohmann::json describe_pool(ledger_view const& view);

}  // namespace sluice::memhandover
