/// Bodies of the Open Inference Protocol V2 ⇄ the values of inference_service.hpp. Pure: no sockets,
/// no clock, no state.
///
///   auto request = decode_infer_request(body, service.metadata("add", ""));
///   // … run it …
///   auto answer = encode_infer_response(response, request.form);   // JSON, and tensors behind it
///
/// Tensor data may be nested as the shape says, or flat; row-major either way. FP tensors may hold
/// the strings "NaN", "Infinity" and "-Infinity" where JSON has no number, in requests and in
/// responses (the spelling of protobuf's JSON mapping). BYTES elements are JSON strings. Integers
/// are exact over their whole range; a number with a fraction or an exponent is not an integer, and
/// a number that the type cannot hold is refused, never wrapped or turned infinite.
///
/// Tensors may stand behind the JSON as they are in memory, in requests (`binary_data_size`) and in answers (`binary_data`,
/// `binary_data_output`); they are not copied, but parts of the body. BOOL is then a byte of 0 or 1 for each element.
///
/// Every fault of a request throws `error`: `invalid_argument` with a sentence that names the
/// tensor, what is wrong and what would be right, or `unsupported` where it asks for an extension
/// of the protocol that is not there (shared memory, classification). Memory grows
/// with the bytes that came, never with what a shape claims.
///
/// Source: Open Inference Protocol, "Inference Request/Response JSON Object"; request parameters
/// `priority`, and `timeout` in microseconds, from Triton's schedule_policy extension; its binary_tensor_data extension.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/content_coding.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// What came: JSON, and the tensors behind it.
struct infer_body {
  std::string_view json;
  std::span<std::byte> raw{};
  bool has_length = false;               ///< the client has said how long the JSON is
  std::shared_ptr<void const> keeper{};  ///< of `raw`, of which tensors become parts
};

/// How the outputs of an answer are written.
struct output_form {
  bool binary = false;  ///< those of which nothing else is said
  std::map<std::string, bool> by_output{};
  content_coding coding = content_coding::identity;  ///< of the body, if it is not short

  [[nodiscard]] bool is_binary(std::string const& output) const;
};

struct decoded_request : infer_request {
  output_form form;  ///< of the answer, which the service does not know
};

struct encoded_response {
  std::string json;
  std::vector<tensor_bytes> tensors;  ///< the binary ones, in their order
};

/// Reads and checks a request against the model it is for. `inputs` come in the order of
/// `metadata.inputs`, whatever their order in `body`; `model` is `metadata.name`, `version` is left
/// empty for the caller to fill in.
[[nodiscard]] decoded_request decode_infer_request(infer_body const& body,
                                                   model_metadata const& metadata);
[[nodiscard]] inline decoded_request decode_infer_request(std::string_view json,
                                                          model_metadata const& metadata) {
  return decode_infer_request(infer_body{json}, metadata);
}

/// Throws `internal` when a tensor's bytes do not fit its shape and type, `unsupported` when a
/// BYTES element is not UTF-8, which JSON cannot carry.
[[nodiscard]] encoded_response encode_infer_response(infer_response const& response,
                                                     output_form const& form = {});

/// `GET v2/models/M`.
[[nodiscard]] nlohmann::json encode_model_metadata(model_metadata const& metadata);
/// `{"error": message}`; bytes that are not UTF-8 are replaced.
[[nodiscard]] std::string encode_error(std::string_view message);

}  // namespace sluice::server
