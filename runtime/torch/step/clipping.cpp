#include "runtime/torch/step/detail/clipping.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "runtime/torch/step/detail/tensor_groups.hpp"

namespace sluice::detail {
namespace {

at::Tensor norm_of(std::vector<std::vector<at::Tensor>> const& groups) {
  std::vector<at::Tensor> norms;
  for (auto const& group : groups) {
    for (auto const& norm : at::_foreach_norm(group, 2.0)) {
      norms.push_back(norm.to(groups[0][0].device()));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), 2.0);
}

}  // namespace

at::Tensor clip_gradients(std::vector<at::Tensor> const& params, double most) {
  constexpr double not_zero = 1e-6;  // as in torch
  at::NoGradGuard const no_grad;
  std::vector<at::Tensor> gradients;
  for (auto const& param : params) {
    if (param.grad().defined()) {
      gradients.push_back(param.grad());
    }
  }
  if (gradients.empty()) {
    return at::zeros({});
  }
  auto const groups = groups_of(gradients);
  auto norm = norm_of(groups);
  auto const factor = ((norm + not_zero).reciprocal() * most).clamp_max(1.0);
  for (auto const& group : groups) {
    at::_foreach_mul_(group, factor.to(group[0].device()));
  }
  return norm;
}

}  // namespace sluice::detail
