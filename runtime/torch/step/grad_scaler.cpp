#include "runtime/torch/step/sluice/grad_scaler.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <stdexcept>

#include "runtime/torch/step/detail/tensor_groups.hpp"

namespace sluice {
namespace {

void check(grad_scaler_options const& options) {
  if (!(options.init_scale > 0) || !(options.growth_factor > 1) ||
      !(options.backoff_factor > 0 && options.backoff_factor < 1) || options.growth_interval < 1 ||
      options.growth_tracker < 0) {
    throw std::invalid_argument{
        "a gradient scaler needs an init_scale of more than 0, a growth_factor of more than 1, a "
        "backoff_factor between 0 and 1, and a growth_interval of at least 1"};
  }
}

}  // namespace

struct grad_scaler::state {
  grad_scaler_options options;
  at::Tensor scale;                   ///< of float, without dimensions; undefined until `place`
  at::Tensor growth_tracker;          ///< of int32, beside it
  std::vector<at::Tensor> overflown;  ///< of each device with gradients: not 0 if there was some
};

grad_scaler::grad_scaler(grad_scaler_options const& options)
    : state_{std::make_shared<state>(state{options, {}, {}, {}})} {
  check(options);
}

double grad_scaler::get_scale() const {
  return state_->scale.defined() ? state_->scale.item<double>() : state_->options.init_scale;
}

std::int64_t grad_scaler::get_growth_tracker() const {
  return state_->growth_tracker.defined() ? state_->growth_tracker.item<std::int64_t>()
                                          : state_->options.growth_tracker;
}

void grad_scaler::place(at::Tensor const& beside) {
  if (!state_->scale.defined()) {
    auto const options = at::TensorOptions{beside.device()};
    state_->scale = at::full({}, state_->options.init_scale, options.dtype(at::kFloat));
    state_->growth_tracker = at::full({}, state_->options.growth_tracker, options.dtype(at::kInt));
  }
}

at::Tensor grad_scaler::scale(at::Tensor const& loss) const {
  return loss * state_->scale.to(loss.device(), /*non_blocking=*/true);
}

void grad_scaler::unscale(std::vector<at::Tensor> const& params) {
  at::NoGradGuard const no_grad;
  std::vector<at::Tensor> gradients;
  for (auto const& param : params) {
    if (auto const& gradient = param.grad(); gradient.defined()) {
      gradients.push_back(gradient.is_sparse() ? gradient._values() : gradient);
    }
  }
  auto const groups = detail::groups_of(gradients);
  if (std::ranges::any_of(groups, [](auto const& of) { return of[0].dtype() == at::kHalf; })) {
    throw std::invalid_argument{"Attempting to unscale FP16 gradients."};
  }
  auto const inverse = state_->scale.to(at::kDouble).reciprocal().to(at::kFloat);
  state_->overflown.clear();
  for (auto const& group : groups) {
    auto const device = group[0].device();
    auto found = std::ranges::find(state_->overflown, device, &at::Tensor::device);
    if (found == state_->overflown.end()) {
      state_->overflown.push_back(at::zeros_like(inverse, at::TensorOptions{device}));
      found = std::prev(state_->overflown.end());
    }
    at::_amp_foreach_non_finite_check_and_unscale_(group, *found, inverse.to(device));
  }
}

bool grad_scaler::all_finite() const {
  if (state_->overflown.empty()) {
    throw std::logic_error{
        "No inf checks were recorded for this optimizer: none of its parameters has a gradient"};
  }
  return std::ranges::all_of(state_->overflown,
                             [](auto const& each) { return each.template item<float>() == 0.0F; });
}

void grad_scaler::update() {
  if (state_->overflown.empty()) {
    throw std::logic_error{"No inf checks were recorded prior to update: unscale gradients first"};
  }
  at::NoGradGuard const no_grad;
  auto any = at::zeros_like(state_->scale);
  for (auto const& each : state_->overflown) {
    any += each.to(any.device());
  }
  auto const& options = state_->options;
  at::_amp_update_scale_(state_->scale, state_->growth_tracker, any, options.growth_factor,
                         options.backoff_factor, options.growth_interval);
  state_->overflown.clear();
}

}  // namespace sluice
