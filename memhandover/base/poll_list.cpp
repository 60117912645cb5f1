#include "memhandover/base/poll_list.hpp"

#include <cerrno>
#include <cstring>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/waiting.hpp"

namespace sluice::memhandover {

void poll_list::wait(std::optional<std::chrono::steady_clock::time_point> until) {
  if (::poll(polled_.data(), polled_.size(), poll_timeout(until)) < 0) {
    if (errno != EINTR) {
      throw error{error_kind::internal, std::string{"poll failed: "} + std::strerror(errno)};
    }
    for (auto& each : polled_) {
      each.revents = 0;
    }
  }
}

}  // namespace sluice::memhandover
