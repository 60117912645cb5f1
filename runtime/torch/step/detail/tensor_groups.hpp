/// Tensors that one launch can work on.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace sluice::detail {

/// Those of one device and type together, in the order in which the first of each has come.
[[nodiscard]] std::vector<std::vector<at::Tensor>> groups_of(
    std::vector<at::Tensor> const& tensors);

}  // namespace sluice::detail
