/// Gradients of a global batch, added up over its micro-batches outside the arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {

/// Sums of gradients, parameter by parameter.
///
///     begin ─► (micro-batch ─► take | forget)… ─► finish ─► divide ─► show
///
/// In plain libtorch gradients add up where autograd puts them, in the same order and so to the
/// same bits.
class gradients {
 public:
  /// `apart`: whether to keep the sums in memory of their own, since the gradients' memory may be
  /// taken away.
  explicit gradients(bool apart) : apart_{apart} {}

  /// Starts a global batch, in which these parameters have no gradients yet.
  void begin(std::vector<torch::Tensor> const& params);
  /// Drops the gradients of a micro-batch that does not count.
  void forget();
  /// Adds the gradients of a micro-batch to the sums; the first is copied. Throws step_error if one
  /// is sparse.
  void take();
  /// The last micro-batch has been taken; no parameter has a gradient until `show`.
  void finish();
  /// Divides the finished sums.
  void divide(slice_weight const& by);
  /// Makes the finished sums the parameters' gradients.
  void show();

 private:
  struct entry {
    torch::Tensor param;
    torch::Tensor sum;   ///< made before the first micro-batch, so that it lies beside the others
    bool begun = false;  ///< whether this batch has added to it
  };

  bool apart_;
  std::vector<entry> entries_;
};

/// The parameters that require a gradient: the optimizer's, then the model's others. Throws
/// std::invalid_argument if the optimizer has none.
[[nodiscard]] std::vector<torch::Tensor> trained(torch::nn::Module const& model,
                                                 torch::optim::Optimizer const& optimizer);

}  // namespace sluice::detail
