/// Sleeping until a word of this process changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace sluice::gate {

[[nodiscard]] inline timespec to_timespec(std::chrono::nanoseconds span) noexcept {
  auto const seconds = std::chrono::duration_cast<std::chrono::seconds>(span);
  return {static_cast<time_t>(seconds.count()), static_cast<long>((span - seconds).count())};
}

/// Sleeps while the word is `seen`, at most so long. False if a signal's handler has run meanwhile.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::nanoseconds at_most) noexcept {
  timespec const limit = to_timespec(at_most);
  return ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0) == 0 ||
         errno != EINTR;
}

inline void futex_wake(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace sluice::gate
