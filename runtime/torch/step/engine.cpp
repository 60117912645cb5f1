#include "runtime/torch/step/detail/engine.hpp"

#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sluice::detail {
namespace {

/// Of the rehearsal before the first step: two, since batch statistics need more than one.
constexpr std::int64_t rehearsal_samples = 2;

/// Optimizers make their state in the first step and need their most memory by the second; torch
/// keeps that for them.
constexpr std::int64_t optimizer_warm_up_steps = 2;

bool has_batch_statistics(torch::nn::Module const& model) {
  bool found = false;
  model.apply([&found](torch::nn::Module const& module) {
    found = found || dynamic_cast<torch::nn::BatchNorm1dImpl const*>(&module) != nullptr ||
            dynamic_cast<torch::nn::BatchNorm2dImpl const*>(&module) != nullptr ||
            dynamic_cast<torch::nn::BatchNorm3dImpl const*>(&module) != nullptr;
  });
  return found;
}

/// There is one: the optimizer has some.
torch::Tensor first_trained(std::vector<torch::Tensor> const& params) {
  return *std::ranges::find_if(params, [](auto const& param) { return param.requires_grad(); });
}

/// For as long as a micro-batch runs.
class marked {
 public:
  explicit marked(bool& flag) : flag_{flag} { flag = true; }
  ~marked() { flag_ = false; }
  marked(marked const&) = delete;
  marked& operator=(marked const&) = delete;

 private:
  bool& flag_;
};

}  // namespace

std::int64_t samples_of(step::tensors const& batch) {
  std::int64_t samples = 0;
  for (auto const& tensor : batch) {
    if (!tensor.defined()) {
      throw std::invalid_argument{"a tensor of the batch is undefined"};
    }
    if (tensor.dim() == 0) {
      continue;
    }
    if (samples != 0 && tensor.size(0) != samples) {
      throw std::invalid_argument{
          "the tensors of a batch must agree in dimension 0 but have " + std::to_string(samples) +
          " and " + std::to_string(tensor.size(0)) +
          " samples; what is no sample does not belong into the batch: let the loss function "
          "capture it"};
    }
    samples = tensor.size(0);
    if (samples == 0) {
      break;
    }
  }
  if (samples < 1) {
    throw std::invalid_argument{
        "a step needs at least one tensor with at least one sample in dimension 0"};
  }
  return samples;
}

engine::engine(torch::nn::Module const& model, torch::optim::Optimizer const& optimizer,
               step_options const& options)
    : model_{model},
      optimizer_{optimizer},
      micro_batch_{options.micro_batch},
      reduction_{options.reduction},
      scaler_{options.scaler},
      cuda_{first_trained(params_of(model, optimizer)).is_cuda()},
      runtime_{attach(cuda_)},
      arena_{runtime_ == nullptr ? nullptr : make_arena(*runtime_, cuda_)},
      random_{options.generators, cuda_},
      buffers_{model},
      gradients_{runtime_ != nullptr},
      planner_{runtime_, options.adapt.value_or(!has_batch_statistics(model))},
      rehearsed_{runtime_ == nullptr} {}

void engine::run(step::loss_function const& loss_of, step::tensors const& batch, losses& into,
                 update* last) {
  auto const total = samples_of(batch);
  if (running_) {
    throw step_error{"a step cannot begin inside of a micro-batch"};
  }
  refuse_child();
  marked const running{running_};
  auto const params = params_of(model_, optimizer_);
  gradients_.begin(params);
  if (scaler_) {
    scaler_->place(first_trained(params));  // not in memory that is taken away
  }
  if (!rehearsed_) {
    rehearse(loss_of, cut(batch, 0, std::min(rehearsal_samples, total), total));
    rehearsed_ = true;
  }
  auto const largest = std::min(micro_batch_.value_or(total), total);
  for (std::int64_t done = 0; done < total;) {
    refuse_child();  // the loss function may have forked
    auto const samples = planner_.next(total - done, largest);
    counts_.micro_batch = samples;
    auto* const then = done + samples == total ? last : nullptr;
    if (try_slice(loss_of, cut(batch, done, samples, total), into, then)) {
      ++counts_.commits;
      failed_rehearsal_.forget();
      done += samples;
    }
  }
  if (last == nullptr || !last->has_run()) {
    gradients_.finish();
  }
}

bool engine::may_run_ahead() const {
  return runtime_ != nullptr && !scaler_ && counts_.steps >= optimizer_warm_up_steps &&
         can_be_taken_back(optimizer_);
}

void engine::refuse_child() const {
  if (runtime_ != nullptr && runtime_->is_inherited()) {
    throw step_error{
        "this step was made before the process was forked, and a forked child of a training "
        "process cannot train in the pool; let the child start a program of its own, or make the "
        "model and its step in the child, where they train without sharing"};
  }
}

engine::slice engine::cut(step::tensors const& batch, std::int64_t start, std::int64_t samples,
                          std::int64_t total) {
  slice result{{}, samples, total};
  for (auto const& tensor : batch) {
    result.tensors.push_back(tensor.dim() == 0 ? tensor : tensor.narrow(0, start, samples));
  }
  return result;
}

void engine::show_gradients(losses const& of) {
  if (auto const by = of.divisor()) {
    gradients_.divide(*by);
  }
  gradients_.show();
  if (arena_ && counts_.steps < optimizer_warm_up_steps) {
    arena_->release();
  }
}

void engine::count_step(step::tensors const& batch) {
  ++counts_.steps;
  counts_.samples += samples_of(batch);
}

step_stats engine::stats() const {
  auto result = counts_;
  result.wait_seconds = planner_.waited().count();
  if (runtime_ != nullptr) {
    using seconds = std::chrono::duration<double>;
    result.discarded_seconds = seconds{std::chrono::nanoseconds{runtime_->discarded_ns()}}.count();
  }
  return result;
}

}  // namespace sluice::detail
