#include "runtime/torch/step/detail/backward.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <string>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {
namespace {

constexpr char const* has_run_before =
    "backward had run through the graph of this loss before: the step runs backward itself, so "
    "leave "
    ".backward() out of the loss function; and a tensor that it takes over from an earlier call "
    "wants .detach()";

double square_of(at::Tensor const& tensor) {
  return tensor.to(at::kFloat).square().sum().item<double>();
}

void set_multithreading(bool enabled) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled);
}

}  // namespace

void run_backward(at::Tensor const& loss) {
  if (!loss.requires_grad()) {
    throw step_error{
        "the loss of a slice has no gradient: nothing that requires one has gone into it, or it "
        "was "
        "detached. The step runs backward itself; return the loss as it is, without .backward() "
        "and "
        ".detach(), and compute it where gradients are on"};
  }
  try {
    loss.backward();
  } catch (c10::Error const& why) {
    if (std::string{why.what_without_backtrace()}.find(
            "backward through the graph a second time") == std::string::npos) {
      throw;
    }
    throw step_error{has_run_before};
  }
}

void refuse_doubled(std::vector<std::pair<at::Tensor, at::Tensor>> const& earlier,
                    std::vector<at::Tensor> const& params, at::Tensor const& loss,
                    at::Tensor const& root) {
  constexpr double rounding = 1e-4;
  at::NoGradGuard const no_grad;
  if (earlier.size() != params.size()) {
    return;
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!earlier[i].first.is_same(params[i]) || earlier[i].second.layout() != at::kStrided) {
      return;
    }
  }
  double apart = 0.0, whole = 0.0;
  auto const ratio = (root / loss).item<double>();
  for (auto const& [param, before] : earlier) {
    auto const expected = before * ratio;
    apart += square_of(param.grad() - before - expected);
    whole += square_of(expected);
  }
  if (apart <= rounding * whole && whole > 0) {
    throw step_error{has_run_before};
  }
}

void empty_backward_queue() {
  at::AutoGradMode const with_grad{true};
  at::ones({}).requires_grad_().backward();
}

backward_here::backward_here(bool cuda)
    : before_{c10::AutogradState::get_tls_state().get_multithreading_enabled()} {
  if (cuda) {
    set_multithreading(false);
  }
}

backward_here::~backward_here() {
  set_multithreading(before_);
}

}  // namespace sluice::detail
