/// Jobs whose memory is in host copies, or has been, as a table: how much, how often, and their turns.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sluice::cli::detail {

/// `clients` as status has them; nothing if none has been parked.
[[nodiscard]] std::string parking_text(nlohmann::json const& clients);

}  // namespace sluice::cli::detail
