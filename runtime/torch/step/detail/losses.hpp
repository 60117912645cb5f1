/// How the losses of slices add up to the loss of their batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {

/// What a slice adds to its batch, detached. Without a part there was no loss, since the slice's
/// memory had gone.
struct contribution {
  torch::Tensor part;
  torch::Tensor root;  ///< what backward has run on; undefined if it has not
  std::optional<slice_weight> weight;
};

/// The losses of one global batch.
///
/// With the losses lᵢ of slices of nᵢ of n samples, the batch's loss is the sum of lᵢ nᵢ/n (mean)
/// or of lᵢ (sum); with weights wᵢ that the slices bring, the sum of wᵢ lᵢ divided by the sum of
/// wᵢ. Since that is known only after the last slice, backward runs on wᵢ lᵢ, and the gradients are
/// divided once.
class losses {
 public:
  explicit losses(reduction how) : how_{how} {}

  /// Runs backward, scaled by `scaler` unless that is null, on what a slice with this share of the
  /// samples adds to the batch's loss before it is divided. Not for a slice of weight 0.
  ///
  /// Throws std::invalid_argument for what is no loss or no weight, and if the slice brings a
  /// weight and others do not, or the reduction is a sum; step_error as `run_backward`.
  [[nodiscard]] contribution backward(slice_loss of, double share, grad_scaler const* scaler);
  /// A slice is committed.
  void add(contribution const& of);

  /// By what to divide the sums of the losses and of the gradients; none: by nothing. Throws
  /// std::invalid_argument if all weights are zero.
  [[nodiscard]] std::optional<slice_weight> divisor() const;
  /// The batch's loss, a scalar, detached.
  [[nodiscard]] torch::Tensor result() const;

 private:
  [[nodiscard]] torch::Tensor scaled(slice_loss const& of, double share);

  reduction how_;
  std::optional<bool> weighted_;
  torch::Tensor loss_;
  slice_weight weight_ = 0.0;
};

}  // namespace sluice::detail
