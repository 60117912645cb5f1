/// Messages of inference.GRPCInferenceService's inference calls ⇄ the values of inference_service.hpp. Pure: no sockets, no clock, no
/// state; what holds of a request however it came is checked in request_checks.hpp.
///
///   auto const asked = read_infer_request(parts);
///   auto request = decode_infer_request(asked, service.metadata(asked->model_name(), ""));
///   // … run it …
///   auto const message = encode_infer_message(response);   // pieces, one behind the other
///
/// Tensors come in `raw_input_contents` or, all of them, in the `contents` of inputs, and go in `raw_output_contents`. Of the first they
/// are parts of the message, which they keep; FP16 and BF16 have no other form. Outputs are sent as they are, without a copy.
///
/// Throws `error` as oip_codec.hpp does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace inference {
class ModelInferRequest;  // NOLINT(readability-identifier-naming): protoc's
}

namespace sluice::server {

/// What protobuf, and with it gRPC's clients, take for one message.
inline constexpr std::uint64_t largest_message = 0x7FFF'FFFF;

using infer_message = std::shared_ptr<inference::ModelInferRequest>;

/// `parts` stand one behind the other. Throws `invalid_argument` for bytes that are none, and for so many tensors that the message
/// would take many times its size.
[[nodiscard]] infer_message read_infer_request(std::vector<std::string_view> const& parts);

[[nodiscard]] decoded_request decode_infer_request(infer_message const& asked,
                                                   model_metadata const& metadata);

/// From now on protobuf writes no lines to standard error: what is wrong with a message is its sender's to hear, and nobody else's.
void silence_protobuf();

/// Bytes of a message: texts of its own, and tensors.
using message_pieces = std::vector<tensor_bytes>;

/// Throws `internal` for an output that is not whole, `unsupported` for an answer that no message can hold.
[[nodiscard]] message_pieces encode_infer_message(infer_response const& response);
/// The same as an element of a stream.
[[nodiscard]] message_pieces encode_stream_message(infer_response const& response);
/// An answer of a stream that says why there is none; `id` is the request's.
[[nodiscard]] message_pieces encode_stream_error(std::string_view message, std::string_view id);

[[nodiscard]] message_pieces pieces_of(std::string_view bytes);

}  // namespace sluice::server
