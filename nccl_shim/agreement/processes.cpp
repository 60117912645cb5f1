#include "nccl_shim/agreement/processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "posix/process_facts.hpp"

namespace sluice::nccl_shim {

rank_process this_process() noexcept {
  return {::getpid(), posix::start_ticks_of("self"), posix::pid_namespace_of("self")};
}

watched_process::watched_process(watched_process&& other) noexcept
    : pidfd_{std::exchange(other.pidfd_, -1)} {}

watched_process& watched_process::operator=(watched_process&& other) noexcept {
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

watched_process::~watched_process() {
  if (pidfd_ >= 0) {
    ::close(pidfd_);
  }
}

bool watched_process::has_died(rank_process const& which) noexcept {
  if (pidfd_ < 0) {
    if (which.pid_namespace != posix::pid_namespace_of("self")) {
      return false;
    }
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, which.pid, 0));
    if (pidfd_ < 0) {
      return errno == ESRCH;
    }
    // The pidfd is ours first: if its number had passed to another process by then, the starts differ.
    auto const start = posix::start_ticks_of(std::to_string(which.pid));
    if (which.start_ticks != 0 && start != 0 && start != which.start_ticks) {
      ::close(std::exchange(pidfd_, -1));
      return true;
    }
  }
  pollfd ended{pidfd_, POLLIN, 0};
  return ::poll(&ended, 1, 0) > 0;
}

int open_file(std::string const& path, int flags) noexcept {
  int const file = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0 || file > STDERR_FILENO) {
    return file;
  }
  int const beside = ::fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  int const why = errno;
  ::close(file);
  errno = why;
  return beside;
}

}  // namespace sluice::nccl_shim
