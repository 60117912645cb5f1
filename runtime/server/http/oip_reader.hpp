/// Takes the JSON of an infer request apart, as it streams by: no document tree is built. Where the
/// data of inputs stands is noted, to be read once a type and a shape are known (json_list.hpp).
/// Knows the protocol's grammar, nothing of models; oip_codec.hpp checks the meaning.
///
/// Throws `invalid_argument`: not JSON (with the byte's place), not UTF-8, nested deeper than 64, a
/// key twice in one object, a value of the wrong JSON type. What is between the brackets of data
/// has not been looked at then. Keys that the protocol does not have are passed over.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/json_list.hpp"

namespace sluice::server {

using raw_parameters = std::map<std::string, nlohmann::json>;  ///< strings, numbers and booleans

constexpr std::size_t max_rank = 32;

struct raw_shape {
  std::size_t rank = 0;
  std::vector<nlohmann::json> extents;  ///< scalars; of more than `max_rank` the first
};

/// An element of `inputs` or of `outputs`; the latter have neither datatype, shape nor data.
struct raw_tensor {
  std::string label;  ///< for messages: "input 'x'", or "inputs[2]" as long as there is no name
  std::optional<std::string> name;
  std::optional<std::string> type;
  std::optional<raw_shape> shape;
  std::optional<json_list> data;  ///< part of the request's text
  raw_parameters parameters;
};

struct raw_request {
  json_document document;
  std::optional<std::string> id;
  std::optional<std::vector<raw_tensor>> inputs;
  std::optional<std::vector<raw_tensor>> outputs;
  raw_parameters parameters;
};

/// `what` is the text in messages.
[[nodiscard]] raw_request read_raw_request(std::string_view text, std::string what = "the body");

}  // namespace sluice::server
