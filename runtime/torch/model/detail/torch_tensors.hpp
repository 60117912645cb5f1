/// Tensors of the protocol as tensors of torch, and back. Includes torch; only for the files that
/// torch_model.hpp hides.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server::detail {

/// The element type in torch. Throws `unsupported` for BYTES.
[[nodiscard]] at::ScalarType torch_type(datatype type);

/// "[2, -1]".
[[nodiscard]] std::string shape_text(std::vector<std::int64_t> const& shape);

/// The arguments of `forward` out of a request: matched by name with `specs`, which stand in the
/// order of the arguments. One tensor of one element serves where the argument is an int, float or
/// bool. The result refers to the bytes of `inputs`. Throws `invalid_argument`.
[[nodiscard]] std::vector<c10::IValue> to_arguments(std::vector<tensor>& inputs,
                                                    std::vector<tensor_spec> const& specs,
                                                    std::vector<c10::Argument> const& arguments,
                                                    at::Device device);

/// What `forward` returned, copied: one tensor, a tuple or list of them in the order of `specs`, or
/// a dictionary of them by name. Numbers count as tensors without dimensions. Throws `internal` if
/// it does not fit `specs`, `invalid_argument` if `wanted` names none of them.
[[nodiscard]] std::vector<tensor> from_result(c10::IValue const& result,
                                              std::vector<tensor_spec> const& specs,
                                              std::vector<std::string> const& wanted);

}  // namespace sluice::server::detail
