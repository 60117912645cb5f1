#include "memhandover/base/standard_streams.hpp"

#include <cerrno>
#include <cstring>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {

void occupy_standard_streams() noexcept {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0) {
      (void)::open("/dev/null", O_RDWR | O_CLOEXEC);  // takes the lowest number that is free
    }
  }
}

unique_fd beside_standard_streams(unique_fd fd) noexcept {
  return !fd || fd.get() > STDERR_FILENO ? std::move(fd) : duplicate(fd.get());
}

std::pair<unique_fd, unique_fd> make_pipe(char const* what_for) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) {
    std::pair made{beside_standard_streams(unique_fd{ends[0]}),
                   beside_standard_streams(unique_fd{ends[1]})};
    if (made.first && made.second) {
      return made;
    }
  }
  throw error{error_kind::unavailable,
              std::string{"cannot create a pipe for "} + what_for + ": " + std::strerror(errno)};
}

}  // namespace sluice::memhandover
