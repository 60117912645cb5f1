#include "runtime/torch/step/detail/update.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <typeindex>

namespace sluice::detail {

void update::run() {
  before_.clear();
  for (auto const& [param, state] : optimizer_.state()) {
    before_.emplace_back(param, state->clone());
  }
  begun_ = true;
  loss_ = rest_();
}

void update::take_back() {
  if (!begun_) {
    return;
  }
  auto& state = optimizer_.state();
  state.clear();
  for (auto& [param, before] : before_) {
    state[param] = std::move(before);
  }
  before_.clear();
  take_back_rest_();
  begun_ = false;
  loss_.reset();
}

bool can_be_taken_back(torch::optim::Optimizer const& optimizer) {
  static std::array const known = {
      std::type_index{typeid(torch::optim::SGD)}, std::type_index{typeid(torch::optim::Adam)},
      std::type_index{typeid(torch::optim::AdamW)}, std::type_index{typeid(torch::optim::Adagrad)},
      std::type_index{typeid(torch::optim::RMSprop)}};
  return std::ranges::find(known, std::type_index{typeid(optimizer)}) != known.end();
}

}  // namespace sluice::detail
