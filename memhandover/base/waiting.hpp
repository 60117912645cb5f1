/// Waiting for one descriptor until an instant, whatever signals come meanwhile.
///
///   if (!await_ready(socket, POLLIN, steady_clock::now() + 5s)) {
///     // … nothing came …
///   }
#pragma once

#include <chrono>
#include <optional>

namespace sluice::memhandover {

/// Whether one of `events` (POLLIN, POLLOUT), a hang-up or an error came before `until`, without which
/// it waits for ever. One that has passed asks how it is now. Throws `internal` if the system cannot wait.
[[nodiscard]] bool await_ready(int fd, short events,
                               std::optional<std::chrono::steady_clock::time_point> until);
/// Whether it is so now.
[[nodiscard]] bool is_ready(int fd, short events);

/// How long poll may wait: until that instant in whole milliseconds, 0 if it has passed; −1 without one.
[[nodiscard]] int poll_timeout(std::optional<std::chrono::steady_clock::time_point> until) noexcept;

}  // namespace sluice::memhandover
