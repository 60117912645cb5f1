/// Random state that a micro-batch changes: kept before it, put back if it is discarded.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace sluice::detail {

/// torch's default generators (CPU, and the current CUDA device), and those given. States are
/// restored bit by bit, and with them what cuDNN draws the dropout of recurrent layers from.
class random_state {
 public:
  /// `uses_cuda`: whether the current CUDA device's default generator is used.
  random_state(std::vector<at::Generator> given, bool uses_cuda)
      : given_{std::move(given)}, uses_cuda_{uses_cuda} {}

  /// Remembers every state.
  void save();
  /// Puts back what was remembered.
  void restore();

 private:
  std::vector<at::Generator> given_;
  bool uses_cuda_;
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
  std::uint64_t made_ = 0;  ///< states of dropout, when it was saved
  std::vector<std::pair<at::Tensor, at::Tensor>> of_dropout_;
};

}  // namespace sluice::detail
