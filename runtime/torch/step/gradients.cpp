#include "runtime/torch/step/detail/gradients.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/empty_like.h>

#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

namespace sluice::detail {

void gradients::begin(std::vector<torch::Tensor> const& params) {
  at::NoGradGuard const no_grad;
  std::unordered_map<void*, torch::Tensor> sums;
  for (auto const& [param, sum, begun] : entries_) {
    sums.emplace(param.unsafeGetTensorImpl(), sum);
  }
  entries_.clear();
  for (auto const& param : params) {
    auto& sum = sums[param.unsafeGetTensorImpl()];
    if (apart_ && !sum.defined()) {
      sum = at::empty_like(param);
    }
    entries_.push_back({param, sum});
  }
  forget();
}

void gradients::forget() {
  for (auto& [param, sum, begun] : entries_) {
    param.mutable_grad().reset();
  }
}

void gradients::take() {
  if (!apart_) {
    return;
  }
  at::NoGradGuard const no_grad;
  std::vector<torch::Tensor> begun_sums, addends, new_sums, firsts;
  for (auto& [param, sum, begun] : entries_) {
    auto& grad = param.mutable_grad();
    if (!grad.defined()) {
      continue;
    }
    if (grad.layout() != at::kStrided) {
      throw step_error{
          "sparse gradients cannot be added up outside of a micro-batch; make the embedding with "
          "sparse(false)"};
    }
    (begun ? begun_sums : new_sums).push_back(sum);
    (begun ? addends : firsts).push_back(grad);
    begun = true;
    grad.reset();
  }
  if (!firsts.empty()) {
    at::_foreach_copy_(new_sums, firsts);
  }
  if (!addends.empty()) {
    at::_foreach_add_(begun_sums, addends);
  }
}

void gradients::finish() {
  for (auto& [param, sum, begun] : entries_) {
    if (!apart_) {
      sum = param.grad();
      begun = sum.defined();
    }
  }
  forget();
}

void gradients::divide(slice_weight const& by) {
  at::NoGradGuard const no_grad;
  std::vector<torch::Tensor> sums;
  for (auto const& [param, sum, begun] : entries_) {
    if (begun) {
      sums.push_back(sum);
    }
  }
  if (sums.empty()) {
    return;
  }
  if (auto const* const number = std::get_if<double>(&by)) {
    at::_foreach_div_(sums, *number);
  } else {
    at::_foreach_div_(sums, std::get<torch::Tensor>(by));
  }
}

void gradients::show() {
  for (auto& [param, sum, begun] : entries_) {
    if (begun) {
      param.mutable_grad() = sum;
    }
    if (!apart_) {
      sum.reset();
    }
  }
}

std::vector<torch::Tensor> trained(torch::nn::Module const& model,
                                   torch::optim::Optimizer const& optimizer) {
  std::vector<torch::Tensor> found;
  std::unordered_set<void*> known;
  auto add = [&](std::vector<torch::Tensor> const& params) {
    for (auto const& param : params) {
      if (param.defined() && param.requires_grad() &&
          known.insert(param.unsafeGetTensorImpl()).second) {
        found.push_back(param);
      }
    }
  };
  for (auto const& group : optimizer.param_groups()) {
    add(group.params());
  }
  if (found.empty()) {
    throw std::invalid_argument{"the optimizer has no parameter that requires a gradient"};
  }
  add(model.parameters());
  return found;
}

}  // namespace sluice::detail
