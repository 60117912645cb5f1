/// Tensors that come as numbers of protobuf's, not as bytes. A part of message_codec.hpp.
#pragma once

#include <string_view>

#include "runtime/server/inference/inference_service.hpp"

namespace inference {
class InferTensorContents;  // NOLINT(readability-identifier-naming): protoc's
}

namespace sluice::server {

/// The bytes of the elements that are there, however many the shape says. Throws `invalid_argument` where they are in the list of another
/// type, or one is too large: `label` is their tensor.
[[nodiscard]] tensor_bytes bytes_of_contents(inference::InferTensorContents const& contents,
                                             datatype type, std::string_view label);

}  // namespace sluice::server
