/// When a process uses the device: from the first launch on it until it has done all that it was given.
///
///   resting ──a launch comes──► begins() ──► working ──nothing outstanding──► drained() ──► resting
///
/// While the device rests a bit of the gate's mode leads every launch here, and only the first of a burst finds it: the
/// others cost what they cost without a watch. Whether the device rests is looked at by a thread that comes back from a
/// wait of its own for the device, at once, and else by a thread that looks every 200 µs. It asks streams and records no
/// events, which would cost the device time between two launches. A device that runs dry between two launches of one that
/// launches slowly is not taken to rest: nothing must have been launched since the look before.
///
/// The bit is set first and then every thread seen outside, by the gate's own means (`gate::set_resting`), so that no
/// launch slips through between: what is told is exact.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "abi/gate_api.h"

namespace sluice::gate {

class launch_watch {
 public:
  constexpr launch_watch() noexcept = default;
  ~launch_watch() = default;
  launch_watch(launch_watch const&) = delete;
  launch_watch& operator=(launch_watch const&) = delete;

  /// False if launches would go past the gate, which is said on standard error, or it has been started before.
  [[nodiscard]] bool start(sluice_launch_watcher const& watcher);

  /// A launch has found the device at rest: it is from outside of the gate, and goes there again.
  void something_begins() noexcept;
  /// The calling thread has waited for the device, for something at least.
  void somebody_has_waited() noexcept {
    if (works_.load(std::memory_order_relaxed) != 0) [[unlikely]] {
      look(true);
    }
  }

 private:
  void run() noexcept;
  void look(bool waited) noexcept;

  std::atomic<std::uint32_t> works_{
      0};             ///< 1: between `begins` and `drained`; its thread sleeps by it
  std::mutex mutex_;  ///< guards the rest, and who sets the gate's bit
  bool started_ = false;
  pthread_t thread_{};
  sluice_launch_watcher watcher_{};
};

extern launch_watch process_launch_watch [[gnu::visibility("hidden")]];
/// The process's one watch; never destroyed.
[[nodiscard]] inline launch_watch& the_launch_watch() noexcept {
  return process_launch_watch;
}

}  // namespace sluice::gate
