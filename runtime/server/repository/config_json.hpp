/// A configuration as the JSON that Triton's model_configuration extension answers with.
#pragma once

#include <nlohmann/json.hpp>

namespace google::protobuf {
class Message;
}

namespace sluice::server {

/// Field names stay as they are, enumerators become strings, 64-bit integers numbers, and fields
/// that are not set have their defaults, but for messages.
[[nodiscard]] nlohmann::json config_to_json(google::protobuf::Message const& message);

}  // namespace sluice::server
