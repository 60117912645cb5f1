/// Pieces of text out of JSON, for the commands that print tables. Whatever the JSON's shape, nothing
/// throws for a missing or oddly typed field: `-` stands for what is not there.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::cli::detail {

inline constexpr auto nothing = "-";

/// Null if `object` has no such field, or is no object.
[[nodiscard]] nlohmann::json const& field(nlohmann::json const& object, std::string_view name);
[[nodiscard]] std::string plain(nlohmann::json const& value);
/// With a binary unit.
[[nodiscard]] std::string bytes(nlohmann::json const& value);
[[nodiscard]] std::string milliseconds_of_us(nlohmann::json const& value);
[[nodiscard]] std::string milliseconds(nlohmann::json const& value);

using row = std::vector<std::string>;

/// Left-aligned columns, two blanks apart, indented by two.
[[nodiscard]] std::string table(std::vector<row> const& rows);

/// Backend and device of a pool; the first one on the host needs no number.
[[nodiscard]] std::string place(nlohmann::json const& pool);

/// What a pool is, in one line.
[[nodiscard]] std::string pool_line(nlohmann::json const& pool);

/// The host copies of a pool, in one line; empty if it has none.
[[nodiscard]] std::string host_copies_line(nlohmann::json const& pool);

/// What stands in `pools`, or all of it as the only one.
[[nodiscard]] nlohmann::json several(nlohmann::json const& pools);

}  // namespace sluice::cli::detail
