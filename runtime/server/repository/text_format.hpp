/// Reads protobuf's text format into a tree, without a schema: names and types of fields are the
/// caller's business.
///
///   auto tree = parse_text_format(R"(name: "add"  input { dims: [ -1, 4 ] })", "config.pbtxt");
///   tree.fields[0].name;             // "name"
///   tree.fields[0].values[0].text;   // "add"
///
/// Throws `error` of kind `invalid_argument`: "config.pbtxt:3:9: what is wrong; what would be
/// right". Lines and columns count from 1, columns in bytes. Pure.
///
/// Source: protobuf.dev/reference/protobuf/textformat-spec. Beyond it, strings must be UTF-8 (they
/// become JSON) and messages nest at most 64 deep.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/base/error.hpp"

namespace sluice::server {

struct text_position {
  std::size_t line = 1;
  std::size_t column = 1;
};

struct text_field;

/// What stands behind a field's name. `kind` says which of the other members holds it.
struct text_value {
  enum class kind_t { identifier, integer, real, string, message };
  kind_t kind = kind_t::message;
  text_position where;
  std::string text;             ///< identifier; string with its escapes resolved
  bool negative = false;        ///< integer: sign
  std::uint64_t magnitude = 0;  ///< integer: absolute value
  double real = 0;
  std::vector<text_field> fields;  ///< message
};

/// One mention of a field. A repeated field may be mentioned several times, each time with one
/// value or a list.
struct text_field {
  std::string name;  ///< extensions and Any types keep their brackets: "[type.googleapis.com/x.Y]"
  text_position where;
  bool list = false;  ///< written as [ … ], which only a repeated field may be
  std::vector<text_value> values;
};

/// `file` is only a name for messages.
[[nodiscard]] text_value parse_text_format(std::string_view text, std::string const& file);

/// An error at a place in a file, in the form that parse_text_format uses.
[[nodiscard]] error text_error(std::string const& file, text_position where,
                               std::string_view message,
                               error_kind kind = error_kind::invalid_argument);

}  // namespace sluice::server
