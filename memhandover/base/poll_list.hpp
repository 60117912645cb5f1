/// What one turn of a loop waits for.
///
///   poll_list polled;
///   auto const bell = polled.add(bell_fd);
///   polled.wait(deadline);
///   if (polled.ready(bell)) {
///     // … read it …
///   }
#pragma once

#include <chrono>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include <poll.h>

namespace sluice::memhandover {

class poll_list {
 public:
  /// The place of `fd`, which is ready when it can be read or has been hung up; a negative one never
  /// is. The system waits for no more descriptors than a process may open, those that are none included:
  /// they have no place.
  [[nodiscard]] std::size_t add(int fd) {
    if (fd < 0) {
      return nowhere;
    }
    polled_.push_back({fd, POLLIN, 0});
    return polled_.size() - 1;
  }
  /// Until something is ready, or until that time. Throws `internal` if the system cannot wait.
  void wait(std::optional<std::chrono::steady_clock::time_point> until);
  [[nodiscard]] bool ready(std::size_t place) const noexcept {
    return place < polled_.size() && polled_[place].revents != 0;
  }

 private:
  static constexpr std::size_t nowhere = std::numeric_limits<std::size_t>::max();

  std::vector<pollfd> polled_;
};

}  // namespace sluice::memhandover
