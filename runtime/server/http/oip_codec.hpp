/// JSON of the Open Inference Protocol V2 ⇄ the values of inference_service.hpp. Pure: no sockets,
/// no clock, no state.
///
///   auto request = decode_infer_request(body, service.metadata("add", ""));
///   // … run it …
///   std::string answer = encode_infer_response(response);
///
/// Tensor data may be nested as the shape says, or flat; row-major either way. FP tensors may hold
/// the strings "NaN", "Infinity" and "-Infinity" where JSON has no number, in requests and in
/// responses (the spelling of protobuf's JSON mapping). BYTES elements are JSON strings. Integers
/// are exact over their whole range; a number with a fraction or an exponent is not an integer, and
/// a number that the type cannot hold is refused, never wrapped or turned infinite.
///
/// Every fault of a request throws `error`: `invalid_argument` with a sentence that names the
/// tensor, what is wrong and what would be right, or `unsupported` where it asks for an extension
/// of the protocol that is not there (binary tensors, shared memory, classification). Memory grows
/// with the bytes that came, never with what a shape claims.
///
/// Source: Open Inference Protocol, "Inference Request/Response JSON Object"; request parameter
/// `timeout` in microseconds from Triton's schedule_policy extension.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// Reads and checks a request against the model it is for. `inputs` come in the order of
/// `metadata.inputs`, whatever their order in `body`; `model` is `metadata.name`, `version` is left
/// empty for the caller to fill in.
[[nodiscard]] infer_request decode_infer_request(std::string_view body,
                                                 model_metadata const& metadata);

/// Throws `internal` when a tensor's bytes do not fit its shape and type, `unsupported` when a
/// BYTES element is not UTF-8, which JSON cannot carry.
[[nodiscard]] std::string encode_infer_response(infer_response const& response);

/// `GET v2/models/M`.
[[nodiscard]] nlohmann::json encode_model_metadata(model_metadata const& metadata);
/// `{"error": message}`; bytes that are not UTF-8 are replaced.
[[nodiscard]] std::string encode_error(std::string_view message);

}  // namespace sluice::server
