/// How a model's configuration and its `forward` fit together. Includes torch; only for the files that torch_model.hpp
/// hides.
#pragma once

#include <ATen/core/function_schema.h>

#include <cstddef>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server::detail {

struct call_signature {
  std::vector<c10::Argument> arguments;  ///< without self
  /// By input: which of them it fills. The others have defaults.
  std::vector<std::size_t> input_places;
  bool takes_dictionary = false;  ///< one argument, which has all inputs by their names
  /// By output: which of the results it is, unless these are a dictionary, which has them by name.
  std::vector<std::size_t> output_places;
  bool is_guess =
      false;  ///< nothing but the order of the configuration says which input is which argument
  bool takes_batches = false;  ///< see torch_tensors.hpp
};

/// Throws `invalid_argument` where they contradict each other: the inputs' names (naming.hpp), the outputs' names, their
/// number, and their types as far as the code says them.
[[nodiscard]] call_signature signature_of(c10::FunctionSchema const& forward,
                                          std::vector<tensor_spec> const& inputs,
                                          std::vector<tensor_spec> const& outputs);

}  // namespace sluice::server::detail
