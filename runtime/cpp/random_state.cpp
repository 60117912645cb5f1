#include "runtime/cpp/detail/random_state.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

namespace sluice::detail {

void random_state::save() {
  saved_.clear();
  auto remember = [this](at::Generator generator) {
    std::lock_guard const lock{generator.mutex()};
    saved_.emplace_back(generator, generator.get_state());
  };
  remember(at::detail::getDefaultCPUGenerator());
  if (uses_cuda_) {
    auto const device = c10::impl::VirtualGuardImpl{at::kCUDA}.getDevice();
    remember(at::globalContext().defaultGenerator(device));
  }
  for (auto const& generator : given_) {
    remember(generator);
  }
}

void random_state::restore() {
  for (auto& [generator, state] : saved_) {
    std::lock_guard const lock{generator.mutex()};
    generator.set_state(state);
  }
}

}  // namespace sluice::detail
