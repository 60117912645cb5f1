/// The text form of `sluice status`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sluice::cli {

/// Aligned tables, pool by pool, of what `pool_and_server` returns. Shows `-` for what the JSON does not have,
/// whatever its shape; never throws for a missing or oddly typed field.
[[nodiscard]] std::string status_text(nlohmann::json const& status);

}  // namespace sluice::cli
