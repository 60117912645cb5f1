#include "runtime/torch/step/sluice/step.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>

#include <string>

#include "runtime/torch/step/detail/engine.hpp"

namespace sluice {
namespace detail {
namespace {

step_options checked(step_options options) {
  if (options.micro_batch && *options.micro_batch < 1) {
    throw std::invalid_argument{"micro_batch must be at least 1, not " +
                                std::to_string(*options.micro_batch)};
  }
  if (options.clip_norm && !(*options.clip_norm > 0)) {
    throw std::invalid_argument{"clip_norm must be more than 0, not " +
                                std::to_string(*options.clip_norm)};
  }
  for (auto const& generator : options.generators) {
    if (!generator.defined()) {
      throw std::invalid_argument{"a generator is undefined"};
    }
  }
  return options;
}

}  // namespace

/// The whole of a step: its micro-batches, and what is done with their gradients.
class training {
 public:
  training(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
           step_options const& options)
      : engine_{model, optimizer, options},
        optimizer_{optimizer},
        clip_norm_{options.clip_norm},
        closure_{
            options.closure.value_or(dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr)} {}

  torch::Tensor run(step::loss_function const& loss_of, step::tensors const& batch) {
    try {
      auto loss = closure_ ? optimize_with_closure(loss_of, batch) : optimize(loss_of, batch);
      engine_.count_step(batch);
      return loss;
    } catch (c10::Error& why) {
      engine_.explain(why);
      throw;
    }
  }

  [[nodiscard]] engine const& micro_batches() const { return engine_; }
  [[nodiscard]] std::optional<double> grad_norm() const { return grad_norm_; }

 private:
  torch::Tensor optimize(step::loss_function const& loss_of, step::tensors const& batch) {
    auto loss = gradients(loss_of, batch);
    optimizer_.step();
    return loss;
  }

  torch::Tensor optimize_with_closure(step::loss_function const& loss_of,
                                      step::tensors const& batch) {
    torch::Tensor first;
    optimizer_.step([&] {
      at::AutoGradMode const with_grad{true};
      auto loss = gradients(loss_of, batch);
      if (!first.defined()) {
        first = loss;
      }
      return loss;
    });
    if (!first.defined()) {
      throw std::invalid_argument{"the optimizer has not called its closure; leave closure out"};
    }
    return first;
  }

  /// Gives the parameters the gradients of the batch. Returns its loss.
  torch::Tensor gradients(step::loss_function const& loss_of, step::tensors const& batch) {
    auto const losses = engine_.run(loss_of, batch);
    engine_.show_gradients(losses);
    if (clip_norm_) {
      std::vector<torch::Tensor> params;
      for (auto const& group : optimizer_.param_groups()) {
        params.insert(params.end(), group.params().begin(), group.params().end());
      }
      grad_norm_ = torch::nn::utils::clip_grad_norm_(params, *clip_norm_);
    }
    return losses.result();
  }

  engine engine_;
  torch::optim::Optimizer& optimizer_;
  std::optional<double> clip_norm_;
  bool closure_;
  std::optional<double> grad_norm_;
};

}  // namespace detail

step::step(for_module /*which*/, torch::nn::Module& model, torch::optim::Optimizer& optimizer,
           step_options options)
    : training_{std::make_unique<detail::training>(model, optimizer,
                                                   detail::checked(std::move(options)))} {}

step::~step() = default;
step::step(step&&) noexcept = default;
step& step::operator=(step&&) noexcept = default;

torch::Tensor step::operator()(loss_function const& loss_of, tensors const& batch) {
  if (!loss_of) {
    throw std::invalid_argument{"the first argument of a step is the loss function, not nothing"};
  }
  return training_->run(loss_of, batch);
}

bool step::shared() const {
  return training_->micro_batches().shared();
}

std::optional<double> step::grad_norm() const {
  return training_->grad_norm();
}

step_stats step::stats() const {
  return training_->micro_batches().stats();
}

}  // namespace sluice
