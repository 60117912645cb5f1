/// Somebody whose threads wait for sockets anyway, and can wait for one more.
#pragma once

#include <functional>

namespace sluice::server {

class socket_watcher {
 public:
  socket_watcher() = default;
  socket_watcher(socket_watcher const&) = delete;
  socket_watcher& operator=(socket_watcher const&) = delete;
  socket_watcher(socket_watcher&&) = delete;
  socket_watcher& operator=(socket_watcher&&) = delete;
  virtual ~socket_watcher() = default;

  using reader = std::function<bool(int socket)>;

  /// Calls `on_readable` on a thread of its own, once at a time, whenever something can be read, until that returns false; with a
  /// descriptor of the same socket that lives as long. Calls `on_end` once it watches no more, as it does when it is stopped.
  /// False: it cannot watch.
  [[nodiscard]] virtual bool watch(int socket, reader on_readable,
                                   std::function<void()> on_end) = 0;
};

}  // namespace sluice::server
