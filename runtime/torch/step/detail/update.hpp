/// What makes a step of the gradients of a batch, and can be taken back as long as its launches have
/// not been made.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace sluice::detail {

/// The rest of a step, once.
///
/// Where launches are left to the gate's submitter, a micro-batch has run on the host long before
/// the device gets to its commit, and whether it counts is open until then. If the thread waited for
/// that, the device would run empty; so the optimizer's launches are left as well, and dropped
/// together with the commit if its memory has gone. What the optimizer has changed on the host,
/// `take_back` puts back.
///
///   made ──run──► has run ──take_back──► made
class update {
 public:
  /// `rest` runs the optimizer's step, and returns the batch's loss. `take_back_rest` puts back what
  /// else it has changed.
  update(torch::optim::Optimizer& optimizer, std::function<at::Tensor()> rest,
         std::function<void()> take_back_rest)
      : optimizer_{optimizer}, rest_{std::move(rest)}, take_back_rest_{std::move(take_back_rest)} {}

  void run();
  /// Nothing that `run` has launched has been done. Nothing happens if it has not run.
  void take_back();

  [[nodiscard]] bool has_run() const { return loss_.defined(); }
  /// Undefined until it has run.
  [[nodiscard]] at::Tensor const& loss() const { return loss_; }

 private:
  using state_of_param = std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  torch::optim::Optimizer& optimizer_;
  std::function<at::Tensor()> rest_;
  std::function<void()> take_back_rest_;
  /// Numbers, and which tensors there are; their contents are the device's.
  std::vector<state_of_param> before_;
  bool begun_ = false;
  at::Tensor loss_;
};

/// Whether all that the optimizer's step does on the host is known: it is one of torch's own, and
/// reads nothing back.
[[nodiscard]] bool can_be_taken_back(torch::optim::Optimizer const& optimizer);

}  // namespace sluice::detail
