/// Lists of tensor elements in a JSON text: found without looking at what is in them, and read into
/// the bytes of a tensor once its type and shape are known. No number takes other memory than its
/// place in the tensor.
///
///   json_document document{"the body", text};
///   auto list = find_list(document, at, 64, "input 'x'");       // at its opening bracket
///   auto read = read_list(document, list, type, 4, "input 'x'");  // a place for four elements
///   read.nesting.size();                                        // so many there are
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "runtime/server/http/list_nesting.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct json_document {
  std::string what;  ///< in messages
  std::string_view text;

  /// Throws `invalid_argument` with the place of `at`, which points into `text`.
  [[noreturn]] void not_json(char const* at, std::string_view reason) const;
};

/// From its opening bracket to the one that closes it.
using json_list = std::string_view;

struct read_elements {
  tensor_bytes bytes;    ///< those of the first elements
  list_nesting nesting;  ///< of all
  std::string
      fault{};  ///< of the first element that the type cannot have: "element 3 of …"; empty: none
};

/// Looks for brackets and strings only; empty if it nests deeper than `most_levels`. Throws
/// `invalid_argument` where it does not end, or holds an object: `label` is its tensor.
[[nodiscard]] json_list find_list(json_document const& document, char const* at,
                                  std::size_t most_levels, std::string_view label);

/// Throws `invalid_argument` for what is not JSON. Has memory for `wanted` elements, however many
/// there are, and for none if the text is too short for so many.
[[nodiscard]] read_elements read_list(json_document const& document, json_list list, datatype type,
                                      std::uint64_t wanted, std::string_view label);

/// As JSON writes it, shortened if long.
[[nodiscard]] std::string text_of_scalar(nlohmann::json const& value);

}  // namespace sluice::server
