/// Running backward for a slice, and ending what it leaves when it is left in its middle.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace sluice::detail {

/// Throws step_error if the loss function has left nothing to do.
void run_backward(at::Tensor const& loss);

/// Throws step_error if a backward from `root`, a multiple of `loss`, has added to the gradients of
/// `params`, which are all that have some, what had come from that loss `earlier` (parameters, and
/// copies of their gradients then), as where the loss function has run it with `retain_graph`.
///
/// Waits for the device. Gradients of another part of a loss are others; sparse ones are not looked
/// at.
void refuse_doubled(std::vector<std::pair<at::Tensor, at::Tensor>> const& earlier,
                    std::vector<at::Tensor> const& params, at::Tensor const& loss,
                    at::Tensor const& root);

/// Autograd leaves nodes that were ready when another one threw in the thread's queue, with their
/// gradients and saved tensors, until the thread's next backward.
void empty_backward_queue();

/// Autograd's thread of the device serves every backward of the process. In the step's own thread,
/// the arena and the gate know what belongs to the micro-batch, and leave what other threads train
/// alone.
class backward_here {
 public:
  explicit backward_here(bool cuda);
  ~backward_here();
  backward_here(backward_here const&) = delete;
  backward_here& operator=(backward_here const&) = delete;

 private:
  bool before_;
};

}  // namespace sluice::detail
