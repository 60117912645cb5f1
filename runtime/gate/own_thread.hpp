/// Threads of the gate's own, in somebody else's process.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace sluice::gate {

/// What such a thread does in the driver. As a process ends its driver goes down, and may crash for who is within it: a handler of
/// exit(3), which runs before that, lets what was left to submitters be made, waits until nothing of this is under way, and
/// nothing of it begins any more. It waits for a second at most for each of these.
class own_work {
 public:
  /// Does not return once the process ends.
  own_work() noexcept;
  own_work(own_work const&) = delete;
  own_work& operator=(own_work const&) = delete;
  ~own_work();
  /// Likewise; for who has waited meanwhile, say for the gate, and is about to call the driver.
  static void go_on() noexcept;
};

/// Registers that handler, once. After the driver has registered its own, since handlers run the other way round.
void leave_driver_at_exit() noexcept;

/// Starts one, which runs a member function; signals are for the program's own threads. False if there can be none.
template <auto Run, typename Of>
[[nodiscard]] bool start_own_thread(pthread_t& thread, char const* name, Of& of) {
  constexpr auto body = [](void* self) -> void* {
    (static_cast<Of*>(self)->*Run)();
    return nullptr;
  };
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  bool const started = ::pthread_create(&thread, nullptr, body, &of) == 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) {
    ::pthread_setname_np(thread, name);
    leave_driver_at_exit();
  }
  return started;
}

}  // namespace sluice::gate
