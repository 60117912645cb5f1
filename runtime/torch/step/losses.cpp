#include "runtime/torch/step/detail/losses.hpp"

#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "runtime/torch/step/detail/backward.hpp"

namespace sluice::detail {
namespace {

void check_loss(torch::Tensor const& loss) {
  if (loss.defined() && loss.dim() == 0 && at::isFloatingType(loss.scalar_type())) {
    return;
  }
  std::ostringstream what;
  if (loss.defined()) {
    what << "a tensor of shape " << loss.sizes() << " and type " << loss.dtype();
  } else {
    what << "an undefined one";
  }
  throw std::invalid_argument{
      "the loss of a slice must be a scalar tensor of floating-point type, not " + what.str() +
      "; reduce it over the slice's samples, for example with .mean()"};
}

/// The weight as a number, or as a tensor if it lies on a device, where reading would wait.
slice_weight checked_weight(slice_weight const& weight) {
  double number = 0.0;
  if (auto const* const tensor = std::get_if<torch::Tensor>(&weight)) {
    if (!tensor->defined() || tensor->dim() != 0 || at::isComplexType(tensor->scalar_type())) {
      throw std::invalid_argument{"the weight of a slice must be a number or a scalar tensor"};
    }
    if (!tensor->is_cpu()) {
      return tensor->detach().to(at::kFloat);
    }
    number = tensor->item().toDouble();
  } else {
    number = std::get<double>(weight);
  }
  if (!std::isfinite(number) || number < 0) {
    throw std::invalid_argument{"the weight of a slice must be finite and not negative, but is " +
                                std::to_string(number)};
  }
  return number;
}

bool is_zero(slice_weight const& weight) {
  auto const* const number = std::get_if<double>(&weight);
  return number != nullptr && *number == 0.0;
}

slice_weight sum(slice_weight const& a, slice_weight const& b) {
  return std::visit([](auto const& x, auto const& y) -> slice_weight { return x + y; }, a, b);
}

}  // namespace

torch::Tensor losses::scaled(slice_loss const& of, double share) {
  if (of.weight && how_ == reduction::sum) {
    throw std::invalid_argument{
        "reduction::sum adds the losses of slices as they are; weights belong to means"};
  }
  if (weighted_ && *weighted_ != of.weight.has_value()) {
    throw std::invalid_argument{"either every slice of a batch brings a weight, or none"};
  }
  weighted_ = of.weight.has_value();
  if (!of.weight) {
    return how_ == reduction::sum || share == 1.0 ? of.loss : of.loss * share;
  }
  auto const type = of.loss.scalar_type();
  // A count of tokens may be more than these can hold.
  auto const loss = type == at::kHalf || type == at::kBFloat16 ? of.loss.to(at::kFloat) : of.loss;
  return std::visit([&](auto const& weight) { return loss * weight; }, *of.weight);
}

contribution losses::backward(slice_loss of, double share, grad_scaler const* scaler) {
  if (of.weight) {
    of.weight = checked_weight(*of.weight);
  }
  check_loss(of.loss);
  auto part = scaled(of, share);
  if (of.weight && is_zero(*of.weight)) {
    return {at::zeros_like(part), {}, of.weight};  // a mean over nothing is not a number
  }
  auto const root = scaler == nullptr ? part : scaler->scale(part);
  run_backward(root);
  return {part.detach(), root.detach(), of.weight};
}

void losses::add(contribution const& of) {
  loss_ = loss_.defined() ? loss_ + of.part : of.part;
  if (of.weight) {
    weight_ = sum(weight_, *of.weight);
  }
}

std::optional<slice_weight> losses::divisor() const {
  if (!weighted_.value_or(false)) {
    return std::nullopt;
  }
  if (is_zero(weight_)) {
    throw std::invalid_argument{"the weights of a batch's slices must not all be zero"};
  }
  return weight_;
}

torch::Tensor losses::result() const {
  auto const by = divisor();
  return by ? std::visit([this](auto const& weight) { return loss_ / weight; }, *by) : loss_;
}

}  // namespace sluice::detail
