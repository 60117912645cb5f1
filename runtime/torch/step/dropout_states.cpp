#include "runtime/torch/step/detail/dropout_states.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_cudnn_init_dropout_state.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <future>
#include <mutex>
#include <optional>

namespace sluice::detail {
namespace {

struct known_states {
  std::mutex mutex;
  std::uint64_t made = 0;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> states;
};

known_states& known() {
  static known_states result;
  return result;
}

at::Tensor make(double dropout, bool train, std::int64_t seed, std::optional<at::ScalarType> type,
                std::optional<at::Layout> layout, std::optional<at::Device> device,
                std::optional<bool> pinned) {
  auto const guard = c10::impl::VirtualGuardImpl{at::kCUDA};
  auto const here = guard.getDevice();
  auto const stream = guard.getStream(here);
  // Only what the step's own thread allocates lies in its micro-batch's memory.
  auto result =
      std::async(std::launch::async, [&] {
        guard.setDevice(here);
        static_cast<void>(guard.exchangeStream(stream));
        at::NoGradGuard const no_grad;
        at::AutoDispatchBelowADInplaceOrView const below;
        return at::_cudnn_init_dropout_state(
            dropout, train, seed,
            at::TensorOptions{}.dtype(type).layout(layout).device(device).pinned_memory(pinned));
      }).get();
  auto& all = known();
  std::lock_guard const lock{all.mutex};
  ++all.made;
  std::erase_if(all.states, [](auto const& state) { return state.expired(); });
  all.states.emplace_back(result.getIntrusivePtr());
  return result;
}

}  // namespace

void look_for_dropout_states() {
  // Above what makes it, and of no other use to an operator without tensors among its arguments.
  static auto const* const library = [] {
    auto* const made =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                         std::make_optional(c10::DispatchKey::ADInplaceOrView),
                                         __FILE__, __LINE__)
            .release();  // until the process ends
    made->impl("_cudnn_init_dropout_state", make);
    return made;
  }();
  static_cast<void>(library);
}

std::uint64_t dropout_states_made() {
  auto& all = known();
  std::lock_guard const lock{all.mutex};
  return all.made;
}

std::vector<std::pair<at::Tensor, at::Tensor>> copies_of_dropout_states() {
  std::vector<std::pair<at::Tensor, at::Tensor>> result;
  at::NoGradGuard const no_grad;
  auto& all = known();
  std::lock_guard const lock{all.mutex};
  for (auto const& each : all.states) {
    if (auto living = each.lock()) {
      at::Tensor state{std::move(living)};
      auto copy = state.clone();
      result.emplace_back(std::move(state), std::move(copy));
    }
  }
  return result;
}

}  // namespace sluice::detail
