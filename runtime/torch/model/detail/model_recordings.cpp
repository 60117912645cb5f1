#include "runtime/torch/model/detail/model_recordings.hpp"

#include <exception>

#include "runtime/server/hosting/model_log.hpp"

namespace sluice::server::detail {

c10::IValue model_recordings::run(std::vector<c10::IValue> arguments,
                                  recordings::forward const& compute) {
  auto* const mine = records_ ? of_this_thread() : nullptr;
  if (mine == nullptr) {
    return compute(std::move(arguments));
  }
  auto result = mine->run(std::move(arguments), compute);
  if (auto const& why = mine->refusal()) {
    refuse(*why);
  } else if (!is_noted_ && mine->count() > 0 && !is_noted_.exchange(true)) {
    log_recorded(model_);
  }
  return result;
}

bool model_recordings::clear() noexcept {
  std::lock_guard const lock{mutex_};
  bool const had_any = !by_thread_.empty();
  by_thread_.clear();
  return had_any;
}

/// Null where it cannot record.
recordings* model_recordings::of_this_thread() {
  std::lock_guard const lock{mutex_};
  auto const found = by_thread_.find(std::this_thread::get_id());
  if (found != by_thread_.end()) {
    return &found->second;
  }
  try {
    return &by_thread_.try_emplace(std::this_thread::get_id(), recorder_of_this_thread())
                .first->second;
  } catch (std::exception const& failure) {
    refuse(failure.what());
    return nullptr;
  }
}

void model_recordings::refuse(std::string const& why) {
  if (records_.exchange(false)) {
    log_not_recorded(model_, why);
  }
}

}  // namespace sluice::server::detail
