/// Threads of the gate's own, in somebody else's process.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace sluice::gate {

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
  }
  return started;
}

}  // namespace sluice::gate
