#include "runtime/server/hosting/launch_listener.hpp"

#include <spdlog/spdlog.h>

#include <mutex>
#include <utility>

#include "runtime/server/hosting/gate_in_process.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// What the gate tells for as long as the process lives; not destroyed before it.
struct receiver {
  std::mutex mutex;
  std::shared_ptr<compute_lease> lease;  ///< guarded by mutex

  template <typename Message>
  void pass_on(Message message) noexcept {
    std::lock_guard const lock{mutex};
    if (!lease) {
      return;
    }
    try {
      message(*lease);
    } catch (...) {  // training goes on, requests take longer
      spdlog::warn("training could not be paused reason={}",
                   telemetry::quoted(caught_error().what()));
    }
  }
};

receiver& the_receiver() {
  static receiver& one = *std::make_unique<receiver>().release();
  return one;
}

void begins(void* of) {
  static_cast<receiver*>(of)->pass_on([](compute_lease& lease) { lease.begins(); });
}

void drained(void* of, int waited) {
  static_cast<receiver*>(of)->pass_on(
      [waited](compute_lease& lease) { lease.drained(waited != 0); });
}

bool watch_launches() {
  auto const* const gate = gate_in_process();
  if (gate == nullptr) {
    spdlog::warn(
        "the gate is not in this process, so training is paused while requests are in "
        "flight; something has cleared LD_PRELOAD");
    return false;
  }
  static sluice_launch_watcher const watcher{sizeof(sluice_launch_watcher), &the_receiver(),
                                             &begins, &drained};
  if (gate->watch_launches(&watcher) != 0) {
    spdlog::warn("launches cannot be watched, so training is paused while requests are in flight");
    return false;
  }
  return true;
}

}  // namespace

launch_listener::launch_listener(std::shared_ptr<compute_lease> lease) {
  static bool const watches = watch_launches();
  listens_ = watches;
  if (listens_) {
    std::lock_guard const lock{the_receiver().mutex};
    the_receiver().lease = std::move(lease);
  }
}

launch_listener::~launch_listener() {
  std::shared_ptr<compute_lease> last;  // destroyed without the lock
  std::lock_guard const lock{the_receiver().mutex};
  last.swap(the_receiver().lease);
}

}  // namespace sluice::server
