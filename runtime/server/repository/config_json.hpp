/// A text-format message as the JSON that Triton's model_configuration extension answers with.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/server/repository/text_format.hpp"

namespace sluice::server {

/// Field names stay as written, enumerators become strings, int64 become numbers (as Triton prints
/// them). Which fields repeat and which are maps is known from ModelConfig; a field unknown to it
/// is an array if mentioned more than once.
[[nodiscard]] nlohmann::json config_to_json(text_value const& message);

}  // namespace sluice::server
