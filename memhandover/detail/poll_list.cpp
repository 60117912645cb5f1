#include "memhandover/detail/poll_list.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "memhandover/error.hpp"

namespace sluice::memhandover::detail {

void poll_list::wait(std::optional<std::chrono::steady_clock::time_point> until) {
  using std::chrono::milliseconds;
  int timeout_ms = -1;
  if (until) {
    auto const left =
        std::chrono::ceil<milliseconds>(*until - std::chrono::steady_clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
  }
  if (::poll(polled_.data(), polled_.size(), timeout_ms) < 0) {
    if (errno != EINTR) {
      throw error{error_kind::internal, std::string{"poll failed: "} + std::strerror(errno)};
    }
    for (auto& each : polled_) {
      each.revents = 0;
    }
  }
}

}  // namespace sluice::memhandover::detail
