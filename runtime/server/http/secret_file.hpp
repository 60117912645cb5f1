/// Reads what nobody but the server's user is to know. Thread-safe.
#pragma once

#include <filesystem>
#include <string>

namespace sluice::server {

/// What stands in the file of the policy's key `of`. Throws `not_found`, or `invalid_argument` with the reason; as ssh does, it refuses
/// a file of this user's that its group or others can use. What is in the file stands in no message.
[[nodiscard]] std::string read_secret_file(std::filesystem::path const& file, char const* of);

/// The same of what everybody may know.
[[nodiscard]] std::string read_public_file(std::filesystem::path const& file, char const* of);

}  // namespace sluice::server
