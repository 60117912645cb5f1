#include "runtime/torch/step/detail/random_state.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

#include "runtime/torch/step/detail/dropout_states.hpp"

namespace sluice::detail {

void random_state::save() {
  saved_.clear();
  of_dropout_.clear();
  auto remember = [this](at::Generator generator) {
    std::lock_guard const lock{generator.mutex()};
    saved_.emplace_back(generator, generator.get_state());
  };
  remember(at::detail::getDefaultCPUGenerator());
  if (uses_cuda_) {
    auto const device = c10::impl::VirtualGuardImpl{at::kCUDA}.getDevice();
    remember(at::globalContext().defaultGenerator(device));
    look_for_dropout_states();
    made_ = dropout_states_made();
    of_dropout_ = copies_of_dropout_states();
  }
  for (auto const& generator : given_) {
    remember(generator);
  }
}

void random_state::restore() {
  // What has been made since is made again; else another generator that shares the state gets it, for
  // torch would make anew what belongs to the one that is told.
  bool const anew = !uses_cuda_ || dropout_states_made() != made_;
  for (auto& [generator, state] : saved_) {
    std::lock_guard const lock{generator.mutex()};
    if (anew || generator.device().is_cpu()) {
      generator.set_state(state);
    } else {
      generator.graphsafe_get_state().set_state(state);
    }
  }
  at::NoGradGuard const no_grad;
  for (auto& [state, before] : of_dropout_) {
    if (!anew) {
      state.copy_(before);
    }
  }
}

}  // namespace sluice::detail
