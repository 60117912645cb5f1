// When a model_host makes the images that its models are loaded from. The executor's.

#include <spdlog/spdlog.h>

#include <algorithm>

#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

bool detail::slot::lacks_image() const noexcept {
  return is.model->image_bytes() < is.model->bytes();
}

bool detail::slot::waits_for_image() const noexcept {
  return state == model_state::cold && lacks_image() && !image_failure;
}

bool detail::slot::can_compute() const noexcept {
  auto const most = is.batching.preserve_ordering ? std::size_t{1} : is.model->most_at_once();
  return !taken && computations.size() < most;
}

/// Once it has failed, only a cold start tries again: its request hears why.
void model_host::impl::want_image(slot& model) {
  model.image_wanted = !model.image_failure;
}

detail::slot* model_host::impl::next_image() {
  auto const found = std::find_if(slots_.begin(), slots_.end(), [](slot const& each) {
    return each.image_wanted && each.lacks_image() && !each.is_in_use();
  });
  return found == slots_.end() ? nullptr : &*found;
}

/// One step, so that a request that comes meanwhile waits for no more than that.
void model_host::impl::extend_image(lock_type& lock, slot& model) {
  auto const place = place_of(model);
  model.taken = true;
  lock.unlock();
  std::optional<error> failure;
  try {
    detail::shown_action const shown{*board_, activity::preparing, place};
    model.is.model->extend_image();
  } catch (...) {
    failure = caught_error();
  }
  lock.lock();
  model.taken = false;
  computes_.notify_one();
  if (failure) {
    spdlog::warn(
        "a model's weights are not on the host before its next cold start model={} reason={}",
        model.is.name, telemetry::quoted(failure->what()));
    model.image_failure = std::move(failure);
    model.image_wanted = false;
  }
  changed_.notify_all();
}

}  // namespace sluice::server
