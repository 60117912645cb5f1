#include "memhandover/base/waiting.hpp"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {

using std::chrono::steady_clock;

int poll_timeout(std::optional<steady_clock::time_point> until) noexcept {
  if (!until) {
    return -1;
  }
  auto const left =
      std::chrono::ceil<std::chrono::milliseconds>(*until - steady_clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

bool await_ready(int fd, short events, std::optional<steady_clock::time_point> until) {
  for (;;) {
    pollfd asked{fd, events, 0};
    int const found = ::poll(&asked, 1, poll_timeout(until));
    if (found > 0) {
      return true;
    }
    if (found < 0 && errno != EINTR) {
      throw error{error_kind::internal, std::string{"poll failed: "} + std::strerror(errno)};
    }
    if (found == 0 && until && steady_clock::now() >= *until) {
      return false;
    }
  }
}

bool is_ready(int fd, short events) {
  return await_ready(fd, events, steady_clock::time_point{});
}

}  // namespace sluice::memhandover
