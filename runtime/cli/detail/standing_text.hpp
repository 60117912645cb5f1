/// Jobs that have a priority or a minimum, as a table.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sluice::cli::detail {

/// `clients` as status has them; nothing if all jobs are as usual.
[[nodiscard]] std::string standing_text(nlohmann::json const& clients);

}  // namespace sluice::cli::detail
