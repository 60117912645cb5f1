/// The buffers of a model, which forward may change: kept before a micro-batch, put back if it is
/// discarded.
#pragma once

#include <torch/nn/module.h>

#include <vector>

namespace sluice::detail {

/// Copies of a model's buffers, in memory that is not given away.
///
/// Values are compared with nothing: batch normalisation changes its running statistics without
/// raising a tensor's version, so only copying them back is exact.
class buffers {
 public:
  explicit buffers(torch::nn::Module const& model) : model_{model} {}

  /// Remembers every buffer's values.
  void save();
  /// Puts them back.
  void restore();

 private:
  torch::nn::Module const& model_;
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> copies_;
};

}  // namespace sluice::detail
