#include "runtime/torch/step/detail/tensor_groups.hpp"

#include <algorithm>

namespace sluice::detail {

std::vector<std::vector<at::Tensor>> groups_of(std::vector<at::Tensor> const& tensors) {
  std::vector<std::vector<at::Tensor>> groups;
  for (auto const& tensor : tensors) {
    auto const found = std::ranges::find_if(groups, [&](auto const& group) {
      return group[0].device() == tensor.device() && group[0].dtype() == tensor.dtype();
    });
    if (found == groups.end()) {
      groups.push_back({tensor});
    } else {
      found->push_back(tensor);
    }
  }
  return groups;
}

}  // namespace sluice::detail
