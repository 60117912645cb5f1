/// Gradients of a global batch, added up over its micro-batches outside the arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
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
  /// Whether all that is trained lies on GPUs, or all on the host.
  [[nodiscard]] bool are_of_one_kind() const;
  /// What `take` changes on the host, for each parameter.
  [[nodiscard]] std::vector<bool> state() const;
  /// After a `take` whose launches have been dropped, and whatever followed it.
  void put_back(std::vector<bool> const& state);
  /// Copies of gradients that are known to have been made since the micro-batch began, each behind
  /// its parameter; more may follow from here on. Where they add up in their own places, only the
  /// first micro-batch of a batch says so.
  [[nodiscard]] std::vector<std::pair<torch::Tensor, torch::Tensor>> earlier();
  /// The parameters that have a gradient now.
  [[nodiscard]] std::vector<torch::Tensor> with_gradients() const;
  /// The last micro-batch has been taken; no parameter has a gradient until `show`.
  void finish();
  /// Divides the finished sums.
  void divide(slice_weight const& by);
  /// Makes the finished sums the parameters' gradients.
  void show();

 private:
  struct entry {
    torch::Tensor param;
    /// Made before the first micro-batch, so that it lies beside the others; undefined while frozen.
    torch::Tensor sum;
    bool begun = false;  ///< whether this batch has added to it
  };

  bool apart_;
  bool none_is_there_ = false;  ///< no parameter has a gradient, unless backward has run since
  std::vector<entry> entries_;
};

/// The optimizer's parameters, then the model's others; frozen ones too, which a loss function may
/// thaw. Throws std::invalid_argument if none of the optimizer's requires a gradient.
[[nodiscard]] std::vector<torch::Tensor> params_of(torch::nn::Module const& model,
                                                   torch::optim::Optimizer const& optimizer);

/// Throws std::invalid_argument if the model has something to learn, and the optimizer none of it.
/// Some of its parameters may lie elsewhere, a temperature say; all of them, if the model is frozen.
void refuse_another_models(torch::optim::Optimizer const& optimizer,
                           torch::nn::Module const& model);

}  // namespace sluice::detail
