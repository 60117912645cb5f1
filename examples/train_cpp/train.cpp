// Trains a small network to tell two spirals apart, in plain libtorch or in the pool:
//
//   build/release/bin/train_cpp
//   build/release/bin/sluice run -- build/release/bin/train_cpp

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <numbers>

#include "sluice/step.hpp"

namespace {

namespace F = torch::nn::functional;

struct samples {
  torch::Tensor points;  ///< float [count, 2]
  torch::Tensor labels;  ///< on which spiral, int64 [count]
};

/// Points of two spirals that wind around each other.
samples spirals(std::int64_t count) {
  auto const labels = torch::randint(2, {count});
  auto const angle = 3 * std::numbers::pi * torch::rand({count}).sqrt() + 0.5;
  auto const turned = angle + std::numbers::pi * labels;
  auto const points = torch::stack({angle * turned.cos(), angle * turned.sin()}, 1) / 10;
  return {points + 0.02 * torch::randn({count, 2}), labels};
}

torch::nn::Sequential network() {
  using namespace torch::nn;
  return Sequential{Linear{2, 128},   Tanh{}, Dropout{0.05},
                    Linear{128, 128}, Tanh{}, Linear{128, 2}};
}

/// The share of points whose spiral is recognised.
double accuracy(torch::nn::Sequential model, samples const& of) {
  torch::NoGradGuard const no_grad;
  model->eval();
  auto const right = model->forward(of.points).argmax(1).eq(of.labels);
  return right.to(torch::kFloat).mean().item<double>();
}

void train() {
  constexpr int epochs = 40, batch = 512;
  torch::manual_seed(0);
  auto const known = spirals(4000), unknown = spirals(1000);
  auto model = network();
  torch::optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions{3e-3}};
  sluice::step step{model, optimizer, {.micro_batch = 128}};
  auto loss_of = [&](auto const& slices) {
    return F::cross_entropy(model->forward(slices[0]), slices[1]);
  };

  torch::Tensor loss;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (auto const& chosen : torch::randperm(known.labels.size(0)).split(batch)) {
      loss = step(loss_of, {known.points.index({chosen}), known.labels.index({chosen})});
    }
  }
  auto const stats = step.stats();
  std::printf("%s: loss %.4f after %lld steps, %lld micro-batches, %lld of them twice\n",
              step.shared() ? "in the pool" : "plain libtorch", loss.item<double>(),
              static_cast<long long>(stats.steps), static_cast<long long>(stats.commits),
              static_cast<long long>(stats.discards));
  std::printf("%.1f %% of 1000 points never seen are recognised\n", 100 * accuracy(model, unknown));
}

}  // namespace

int main() {
  try {
    train();
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "%s\n", why.what());
    return 1;
  }
}
