/// The training step for libtorch: one optimizer step over a global batch, in micro-batches that
/// may be taken away and run again.
///
///   sluice::step step{model, optimizer, {.micro_batch = 64}};
///   auto loss_of = [&](auto const& slices) {
///     return F::cross_entropy(model->forward(slices[0]), slices[1]);
///   };
///   for (auto& [x, y] : loader) {
///     auto const loss = step(loss_of, {x, y});
///   }
///
/// Under `sluice run` the process shares the pool; anywhere else the same arithmetic runs in plain
/// libtorch. What a step means, and what it asks of the loss function, stands in docs/step.md.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "sluice/grad_scaler.hpp"

namespace sluice {

/// Base of the step's own errors. What is wrong with an argument is a std::invalid_argument.
class step_error : public std::runtime_error {
  using runtime_error::runtime_error;
};

/// Not even the smallest permitted micro-batch fits into the pool, and nothing else holds memory
/// that could return.
class out_of_memory_error : public step_error {
  using step_error::step_error;
};

/// Tensors of a discarded micro-batch are still referenced; their memory is gone, so they must not
/// be used.
///
/// The loss function may run more than once. What it keeps beyond its own run must be copied:
/// `.detach().clone()`.
class survivors_error : public step_error {
  using step_error::step_error;
};

/// What the loss of a slice is: its samples' mean (or a mean over a weight that comes with it), or
/// their sum.
enum class reduction : std::uint8_t { mean, sum };

struct step_options {
  /// Most samples in a slice. None: the whole batch.
  std::optional<std::int64_t> micro_batch = std::nullopt;
  /// Whether a slice may become smaller when memory is short. None: unless the model has batch
  /// statistics, whose result depends on the slicing. If not, training waits until a whole slice
  /// fits.
  std::optional<bool> adapt = std::nullopt;
  sluice::reduction reduction = sluice::reduction::mean;
  /// Those that the loss function uses besides torch's default ones.
  std::vector<at::Generator> generators = {};
  /// Scales losses for backward; gradients are unscaled before they are clipped, the optimizer is
  /// left out where one is not finite, and the scale is updated once a step.
  std::optional<grad_scaler> scaler = std::nullopt;
  /// Largest norm of the optimizer's gradients, all taken as one vector.
  std::optional<double> clip_norm = std::nullopt;
  /// Whether the optimizer calls a closure for the loss. None: if it is LBFGS.
  std::optional<bool> closure = std::nullopt;
};

/// What a slice counts in a mean over something else than samples (tokens). A tensor that lies on a
/// GPU is not read.
using slice_weight = std::variant<double, torch::Tensor>;

/// What a loss function returns: a scalar tensor, or a std::pair of it and its weight, a number or
/// a scalar tensor.
struct slice_loss {
  // NOLINTBEGIN(google-explicit-constructor): a loss function returns a tensor, or a pair.
  slice_loss(torch::Tensor of) : loss{std::move(of)} {}
  template <typename Weight>
  requires std::is_arithmetic_v<Weight> slice_loss(std::pair<torch::Tensor, Weight> of)
      : loss{std::move(of.first)}, weight{static_cast<double>(of.second)} {}
  slice_loss(std::pair<torch::Tensor, torch::Tensor> of)
      : loss{std::move(of.first)}, weight{std::move(of.second)} {}
  // NOLINTEND(google-explicit-constructor)

  torch::Tensor loss;
  std::optional<slice_weight> weight;
};

/// Counts since the step was made.
struct step_stats {
  std::int64_t steps = 0;
  std::int64_t samples = 0;
  std::int64_t commits = 0;
  std::int64_t discards = 0;
  std::int64_t micro_batch = 0;  ///< samples of the last one
  double wait_seconds = 0;       ///< for memory
  double discarded_seconds = 0;  ///< that micro-batches had run when they lost theirs
};

namespace detail {
class training;

inline torch::nn::Module& module_of(torch::nn::Module& model) {
  return model;
}
template <typename Model>
torch::nn::Module& module_of(std::shared_ptr<Model> const& model) {
  return model ? *model : throw std::invalid_argument{"the model of a step must not be null"};
}
template <typename Model>
torch::nn::Module& module_of(torch::nn::ModuleHolder<Model> const& model) {
  return module_of(model ? model.ptr() : nullptr);
}
}  // namespace detail

/// Owns the body of a training loop.
///
/// Every call slices the global batch along dimension 0, runs forward and backward for each slice
/// with the loss scaled by its share, adds the gradients to accumulators outside the arena in one
/// protected commit, and runs the optimizer once. A slice whose memory was taken by the inference
/// server counts for nothing and runs again: random state and changed buffers are restored first,
/// so with the same slicing and deterministic kernels training is bit-equal to a run that was never
/// disturbed.
///
/// Model and optimizer must outlive the step. Not thread-safe: one step at a time, from one thread.
class step {
 public:
  using tensors = std::vector<torch::Tensor>;
  /// Called with one slice of each tensor of the batch; may run more than once for a slice.
  using loss_function = std::function<slice_loss(tensors const& slices)>;

  /// `model` is a module, or a std::shared_ptr or holder of one (`TORCH_MODULE`).
  ///
  /// Throws std::invalid_argument for an option of the wrong value, and if the optimizer has no
  /// parameter that requires a gradient, or none of the model's.
  template <typename Model>
  step(Model& model, torch::optim::Optimizer& optimizer, step_options options = {})
      : step{for_module{}, detail::module_of(model), optimizer, std::move(options)} {}
  ~step();
  step(step&&) noexcept;
  step& operator=(step&&) noexcept;
  step(step const&) = delete;
  step& operator=(step const&) = delete;

  /// Trains on one global batch, tensors with the samples in dimension 0; those without a dimension
  /// are passed on whole.
  ///
  /// Returns the loss of the global batch, a scalar, detached: the mean over samples, the weighted
  /// mean, or the sum. If the optimizer calls a closure, what the first call has computed.
  ///
  /// Throws
  ///   std::invalid_argument  if the batch has no sample, or its tensors disagree about how many; if
  ///                          a loss is no scalar of floating-point type; for weights that are
  ///                          negative, not finite, all zero, or only there for some slices
  ///   out_of_memory_error    if the smallest permitted slice can never fit
  ///   survivors_error        if `loss_of` keeps tensors beyond its run and they were taken away
  ///   step_error             for sparse gradients, if the process shares the pool; for a step inside
  ///                          of a step; if the loss has no gradient, or `loss_of` has run backward
  ///                          for it
  ///   std::logic_error       if there is a scaler, and none of the optimizer's parameters has a gradient
  /// and whatever `loss_of` itself throws; the step has then not happened.
  torch::Tensor operator()(loss_function const& loss_of, tensors const& batch);

  /// Whether this process shares the pool.
  [[nodiscard]] bool shared() const;
  /// Norm of the last step's gradients before they were clipped; none without `clip_norm`. An
  /// optimizer finds that of the gradients that it is given. Waits for the device.
  [[nodiscard]] std::optional<double> grad_norm() const;
  [[nodiscard]] step_stats stats() const;

 private:
  struct for_module {};
  step(for_module, torch::nn::Module& model, torch::optim::Optimizer& optimizer,
       step_options options);

  std::unique_ptr<detail::training> training_;
};

}  // namespace sluice
