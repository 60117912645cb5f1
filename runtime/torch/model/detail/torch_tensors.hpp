/// Tensors of the protocol as tensors of torch, and back. Includes torch; only for the files that
/// torch_model.hpp hides.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"
#include "runtime/torch/model/detail/signature.hpp"

namespace sluice::server::detail {

/// The element type in torch. Throws `unsupported` for BYTES.
[[nodiscard]] at::ScalarType torch_type(datatype type);

/// As the protocol names it, e.g. "FP32"; torch's own name where it has none.
[[nodiscard]] std::string type_text(at::ScalarType type);

/// "[2, -1]".
[[nodiscard]] std::string shape_text(std::vector<std::int64_t> const& shape);

/// The arguments of `forward` out of a request: matched by name with `specs`, each of which goes where the signature says;
/// what no input fills has its default. One tensor of one element serves where the argument is an int, float or
/// bool. The result refers to the bytes of `inputs`. Throws `invalid_argument`.
[[nodiscard]] std::vector<c10::IValue> to_arguments(std::vector<tensor>& inputs,
                                                    std::vector<tensor_spec> const& specs,
                                                    call_signature const& signature,
                                                    at::Device device);

/// What `forward` returned, copied: one tensor, a tuple or list of them, of which output `i` is the one at `places[i]`, or
/// a dictionary of them by name. Numbers count as tensors without dimensions. Throws `misconfigured` if
/// it does not fit `specs`, `invalid_argument` if `wanted` names none of them.
[[nodiscard]] std::vector<tensor> from_result(c10::IValue const& result,
                                              std::vector<tensor_spec> const& specs,
                                              std::vector<std::size_t> const& places,
                                              std::vector<std::string> const& wanted);

}  // namespace sluice::server::detail
