#include "runtime/torch/step/sluice/step.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/optim/lbfgs.h>

#include <string>

#include "runtime/torch/step/detail/clipping.hpp"
#include "runtime/torch/step/detail/engine.hpp"

namespace sluice {
namespace detail {
namespace {

step_options checked(step_options options, torch::nn::Module const& model,
                     torch::optim::Optimizer const& optimizer) {
  refuse_another_models(optimizer, model);
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
        reduction_{options.reduction},
        scaler_{options.scaler},
        clip_norm_{options.clip_norm},
        closure_{
            options.closure.value_or(dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr)} {
    if (scaler_ && closure_) {
      throw std::invalid_argument{
          "a gradient scaler cannot be used with an optimizer that calls a closure: the scale "
          "would "
          "change between its calls; train in bfloat16 or float32, which need none"};
    }
  }

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
  [[nodiscard]] std::optional<double> grad_norm() const {
    return grad_norm_.defined() ? std::optional{grad_norm_.item<double>()} : std::nullopt;
  }

 private:
  torch::Tensor optimize(step::loss_function const& loss_of, step::tensors const& batch) {
    losses sums{reduction_};
    auto rest = [&] {
      engine_.finish_gradients();
      return apply(sums);
    };
    update ahead{optimizer_, rest, [this, norm = grad_norm_] { grad_norm_ = norm; }};
    engine_.run(loss_of, batch, sums, engine_.may_run_ahead() ? &ahead : nullptr);
    return ahead.has_run() ? ahead.loss() : apply(sums);
  }

  torch::Tensor optimize_with_closure(step::loss_function const& loss_of,
                                      step::tensors const& batch) {
    torch::Tensor first;
    optimizer_.step([&] {
      at::AutoGradMode const with_grad{true};
      losses sums{reduction_};
      engine_.run(loss_of, batch, sums);
      auto loss = show_gradients(sums);
      clip();
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

  /// Runs the optimizer on the gradients of the batch. Returns its loss.
  torch::Tensor apply(losses const& of) {
    auto loss = show_gradients(of);
    if (scaler_) {
      scaler_->unscale(params());
    }
    clip();
    if (!scaler_ || scaler_->all_finite()) {
      optimizer_.step();
    }
    if (scaler_) {
      scaler_->update();
    }
    return loss;
  }

  /// Gives the parameters the gradients of the batch. Returns its loss.
  torch::Tensor show_gradients(losses const& of) {
    engine_.show_gradients(of);
    return of.result();
  }

  void clip() {
    if (clip_norm_) {
      grad_norm_ = clip_gradients(params(), *clip_norm_);
    }
  }

  /// The optimizer's.
  [[nodiscard]] std::vector<torch::Tensor> params() const {
    std::vector<torch::Tensor> result;
    for (auto const& group : optimizer_.param_groups()) {
      result.insert(result.end(), group.params().begin(), group.params().end());
    }
    return result;
  }

  engine engine_;
  torch::optim::Optimizer& optimizer_;
  reduction reduction_;
  std::optional<grad_scaler> scaler_;
  std::optional<double> clip_norm_;
  bool closure_;
  torch::Tensor grad_norm_;  ///< where the gradients lie; undefined without `clip_norm`
};

}  // namespace detail

step::step(for_module /*which*/, torch::nn::Module& model, torch::optim::Optimizer& optimizer,
           step_options options)
    : training_{std::make_unique<detail::training>(
          model, optimizer, detail::checked(std::move(options), model, optimizer))} {}

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
