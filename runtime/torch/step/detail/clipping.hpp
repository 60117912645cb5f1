/// Clipping of gradients, as torch.nn.utils.clip_grad_norm_ does it in Python, to the bit. That of
/// libtorch reads the norm back, which would wait for the device, and is refused in a commit that
/// lies in the gate's queue.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace sluice::detail {

/// Scales the gradients of these parameters, all taken as one vector, so that its norm is at most
/// `most`. Returns what the norm was, a scalar.
at::Tensor clip_gradients(std::vector<at::Tensor> const& params, double most);

}  // namespace sluice::detail
