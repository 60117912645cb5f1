/// What a configuration may hold, for messages about what it may not.
#pragma once

#include <string>
#include <string_view>

namespace google::protobuf {
class Descriptor;
}

namespace sluice::server {

/// Of a field that messages of that type, by its full name, do not have: which was meant, or where
/// else it belongs.
[[nodiscard]] std::string unknown_field(google::protobuf::Descriptor const& root,
                                        std::string_view type, std::string_view field);

/// Of an enumerator that a field of that name does not take: which it does.
[[nodiscard]] std::string unknown_value(google::protobuf::Descriptor const& root,
                                        std::string_view value, std::string_view field);

}  // namespace sluice::server
