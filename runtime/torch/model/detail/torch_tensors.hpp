/// Tensors of the protocol as tensors of torch, and back. Includes torch; only for the files that
/// torch_model.hpp hides.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "runtime/server/inference/hosted_model.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/torch/model/detail/signature.hpp"

namespace sluice::server::detail {

/// The element type in torch. Throws `unsupported` for BYTES.
[[nodiscard]] at::ScalarType torch_type(datatype type);

/// As the protocol names it, e.g. "FP32"; torch's own name where it has none.
[[nodiscard]] std::string type_text(at::ScalarType type);

/// "[2, -1]".
[[nodiscard]] std::string shape_text(std::vector<std::int64_t> const& shape);

/// Whether an input fills an argument that is a number.
[[nodiscard]] bool takes_numbers(call_signature const& signature);

/// Whether requests can be put together: all inputs have a dimension for that, and none fills an argument that is a number.
[[nodiscard]] bool takes_batches(call_signature const& signature,
                                 std::vector<tensor_spec> const& inputs);

/// The arguments of `forward` out of a request: matched by name with `specs`, each of which goes where the signature says;
/// what no input fills has its default. One tensor of one element serves where the argument is an int, float or
/// bool. The inputs of several requests are put one behind the other along their first dimension; those of one are referred
/// to where they lie. Throws `invalid_argument`.
[[nodiscard]] std::vector<c10::IValue> to_arguments(std::span<model_call> calls,
                                                    std::vector<tensor_spec> const& specs,
                                                    call_signature const& signature,
                                                    at::Device device);

/// What `forward` returned, copied, into `outputs` of each call: one tensor, a tuple or list of them, of which output `i` is
/// the one at `places[i]`, or a dictionary of them by name. Numbers count as tensors without dimensions. Where there are
/// several calls each has the part of the first dimension that it had in the inputs. Throws `misconfigured` if it does
/// not fit `specs`, `invalid_argument` if `wanted` names none of them.
void from_result(c10::IValue const& result, std::vector<tensor_spec> const& specs,
                 std::vector<std::size_t> const& places, std::span<model_call> calls);

}  // namespace sluice::server::detail
