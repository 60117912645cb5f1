/// The examples in the public headers, word for word: compiled, never run.
#include <torch/nn.h>
#include <torch/optim.h>

#include <sluice/step.hpp>
#include <utility>
#include <vector>

namespace header_examples {

namespace F = torch::nn::functional;

void of_step(torch::nn::Sequential model, torch::optim::Optimizer& optimizer,
             std::vector<std::pair<torch::Tensor, torch::Tensor>> loader) {
  sluice::step step{model, optimizer, {.micro_batch = 64}};
  auto loss_of = [&](auto const& slices) {
    return F::cross_entropy(model->forward(slices[0]), slices[1]);
  };
  for (auto& [x, y] : loader) {
    auto const loss = step(loss_of, {x, y});
  }
}

double of_grad_scaler(torch::nn::Sequential model, torch::optim::Optimizer& optimizer,
                      sluice::step::loss_function const& loss_of, torch::Tensor x,
                      torch::Tensor y) {
  sluice::grad_scaler scaler;
  sluice::step step{model, optimizer, {.scaler = scaler}};
  step(loss_of, {x, y});
  return scaler.get_scale();
}

}  // namespace header_examples
