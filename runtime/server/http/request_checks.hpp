/// What holds of an infer request however it came: in JSON, with binary tensors, as a message of protobuf's. Pure.
///
/// Throws `error`, as oip_codec.hpp says.
#pragma once

#include <functional>
#include <optional>

#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/http/oip_reader.hpp"
#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server {

/// Where the bytes of inputs come from whose data is not in the request's document.
struct byte_source {
  /// Asked for each input of the request, in their order. Nothing: its data is in the document.
  std::function<std::optional<tensor_bytes>(raw_tensor const& input)> take;
  /// Throws if there are more than the inputs have taken.
  std::function<void()> expect_end;
};

/// Checks a request against the model it is for, and reads its data.
[[nodiscard]] decoded_request check_request(raw_request const& raw, model_metadata const& metadata,
                                            byte_source const& bytes);

}  // namespace sluice::server
