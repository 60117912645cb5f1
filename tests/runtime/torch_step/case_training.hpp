/// What a case of the specification trains (tests/runtime/step_cases/README.md), with the step for
/// libtorch.
#pragma once

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <cstddef>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::testing {

/// What a loss function throws by itself.
class own_error : public std::exception {
 public:
  [[nodiscard]] char const* what() const noexcept override { return "mine"; }
};

/// Not thread-safe: the script is the process's.
class case_training {
 public:
  /// `shared`: in the scripted pool; else in plain libtorch, and as the loss function would be
  /// without what it does besides.
  case_training(nlohmann::json const& of, bool shared);

  /// One batch.
  void train(std::size_t number);
  /// What must be the same however training was disturbed.
  [[nodiscard]] std::vector<torch::Tensor> learned() const;
  /// How often the loss function has run.
  [[nodiscard]] int runs() const { return runs_; }
  [[nodiscard]] bool has_gradients() const;
  [[nodiscard]] nlohmann::json stats() const;

 private:
  [[nodiscard]] step_options options_of_case();
  [[nodiscard]] step::tensors batch(std::size_t number) const;
  void change(std::string const& what);
  slice_loss loss(step::tensors const& slices);
  torch::Tensor disturbed(std::string const& does, torch::Tensor loss, torch::Tensor const& output);
  void see();

  nlohmann::json case_;
  bool shared_;
  std::string kind_;
  torch::nn::Sequential model_;
  torch::nn::Linear other_ = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<grad_scaler> scaler_;
  std::unique_ptr<step> step_;
  int runs_ = 0;
  std::vector<torch::Tensor> kept_;
  std::vector<torch::Tensor> losses_;
  std::vector<torch::Tensor> weights_;  ///< copies, since the optimizer was seen to run
};

}  // namespace sluice::testing
