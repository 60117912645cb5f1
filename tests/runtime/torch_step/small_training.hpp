/// A small model, its batch, and what training has changed of it, for the tests of the step.
#pragma once

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::testing {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

inline nn::Sequential mlp() {
  return nn::Sequential{nn::Linear{5, 16}, nn::Tanh{}, nn::Linear{16, 3}};
}

/// Threads that wait for each other would take longer than what they compute.
inline bool const one_thread = (at::set_num_threads(1), true);

/// With random layers and batch statistics.
inline nn::Sequential restless_mlp() {
  return nn::Sequential{nn::Linear{5, 16}, nn::BatchNorm1d{16}, nn::Tanh{}, nn::Dropout{0.3},
                        nn::Linear{16, 3}};
}

/// Samples of 5 numbers, and classes; the same for the same seed.
inline step::tensors batch_of(std::int64_t samples, std::uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {torch::randn({samples, 5}, generator), torch::randint(3, {samples}, generator)};
}

/// Copies of parameters and buffers.
inline std::vector<torch::Tensor> weights_of(nn::Module const& model) {
  std::vector<torch::Tensor> result;
  for (auto const& list : {model.parameters(), model.buffers()}) {
    for (auto const& tensor : list) {
      result.push_back(tensor.detach().clone());
    }
  }
  return result;
}

inline bool same_bits(std::vector<torch::Tensor> const& a, std::vector<torch::Tensor> const& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) {
    same = torch::equal(a[i], b[i]);
  }
  return same;
}

inline bool close(std::vector<torch::Tensor> const& a, std::vector<torch::Tensor> const& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) {
    same = torch::allclose(a[i], b[i], 1e-5, 1e-6);
  }
  return same;
}

inline torch::optim::SGD sgd(nn::Module const& model) {
  return torch::optim::SGD{model.parameters(), torch::optim::SGDOptions{0.1}.momentum(0.9)};
}

inline auto cross_entropy_of(nn::Sequential model) {
  return [model](step::tensors const& slices) mutable {
    return F::cross_entropy(model->forward(slices[0]), slices[1]);
  };
}

}  // namespace sluice::testing
