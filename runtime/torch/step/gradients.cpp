#include "runtime/torch/step/detail/gradients.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

namespace sluice::detail {
namespace {

/// Room for the sum of its gradients, unless there is some; a model may become of another type.
void make_room(torch::Tensor& sum, torch::Tensor const& param) {
  if (!sum.defined() || sum.dtype() != param.dtype() || sum.sizes() != param.sizes() ||
      sum.device() != param.device()) {
    sum = at::empty_like(param);
  }
}

}  // namespace

void gradients::begin(std::vector<torch::Tensor> const& params) {
  at::NoGradGuard const no_grad;
  std::unordered_map<void*, torch::Tensor> sums;
  for (auto const& [param, sum, begun] : entries_) {
    sums.emplace(param.unsafeGetTensorImpl(), sum);
  }
  entries_.clear();
  for (auto const& param : params) {
    entries_.push_back({param, {}});
    if (apart_ && param.requires_grad()) {
      auto& sum = entries_.back().sum;
      sum = sums[param.unsafeGetTensorImpl()];
      make_room(sum, param);
    }
  }
  forget();
}

void gradients::forget() {
  for (auto& [param, sum, begun] : entries_) {
    param.mutable_grad().reset();
  }
  none_is_there_ = true;
}

bool gradients::are_of_one_kind() const {
  bool on_gpu = false, on_host = false;
  for (auto const& [param, sum, begun] : entries_) {
    if (param.requires_grad()) {
      (param.is_cuda() ? on_gpu : on_host) = true;
    }
  }
  return !(on_gpu && on_host);
}

std::vector<bool> gradients::state() const {
  std::vector<bool> result;
  result.reserve(entries_.size());
  for (auto const& [param, sum, begun] : entries_) {
    result.push_back(begun);
  }
  return result;
}

void gradients::put_back(std::vector<bool> const& state) {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].begun = state[i];
  }
  forget();
}

std::vector<std::pair<torch::Tensor, torch::Tensor>> gradients::earlier() {
  std::vector<std::pair<torch::Tensor, torch::Tensor>> result;
  if (std::exchange(none_is_there_, false)) {
    for (auto const& param : with_gradients()) {
      result.emplace_back(param, param.grad().clone());
    }
  }
  return result;
}

std::vector<torch::Tensor> gradients::with_gradients() const {
  std::vector<torch::Tensor> result;
  for (auto const& [param, sum, begun] : entries_) {
    if (param.grad().defined()) {
      result.push_back(param);
    }
  }
  return result;
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
    if (!begun) {
      make_room(sum, param);  // it may have thawed since
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
  none_is_there_ = true;
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

std::vector<torch::Tensor> params_of(torch::nn::Module const& model,
                                     torch::optim::Optimizer const& optimizer) {
  std::vector<torch::Tensor> found;
  std::unordered_set<void*> known;
  auto add = [&](std::vector<torch::Tensor> const& params) {
    for (auto const& param : params) {
      if (param.defined() && known.insert(param.unsafeGetTensorImpl()).second) {
        found.push_back(param);
      }
    }
  };
  for (auto const& group : optimizer.param_groups()) {
    add(group.params());
  }
  if (std::ranges::none_of(found, [](auto const& param) { return param.requires_grad(); })) {
    throw std::invalid_argument{"the optimizer has no parameter that requires a gradient"};
  }
  add(model.parameters());
  return found;
}

void refuse_another_models(torch::optim::Optimizer const& optimizer,
                           torch::nn::Module const& model) {
  std::unordered_set<void*> of_model;
  for (auto const& param : model.parameters()) {
    if (param.requires_grad()) {
      of_model.insert(param.unsafeGetTensorImpl());
    }
  }
  bool has_some = of_model.empty();
  for (auto const& group : optimizer.param_groups()) {
    for (auto const& param : group.params()) {
      has_some = has_some || of_model.contains(param.unsafeGetTensorImpl());
    }
  }
  if (!has_some) {
    throw std::invalid_argument{
        "the optimizer has none of the parameters of the model that the step trains: make it of "
        "model->parameters(), after whatever replaces them (a new head), and freeze a model that "
        "something else is learned through (requires_grad_(false))"};
  }
}

}  // namespace sluice::detail
