#include "nccl_shim/agreement/processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

namespace sluice::nccl_shim {
namespace {

/// 0 where that cannot be read.
std::uint64_t start_of(std::string const& process) {
  std::ifstream file{"/proc/" + process + "/stat"};
  std::string line;
  std::getline(file, line);
  // The program's name, the second field, may hold anything; what is counted stands behind its parenthesis.
  auto const name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    return 0;
  }
  std::istringstream rest{line.substr(name_end + 1)};
  constexpr int fields_before = 19;
  std::string field;
  for (int i = 0; i < fields_before; ++i) {
    rest >> field;
  }
  std::uint64_t start = 0;
  rest >> start;
  return start;
}

std::uint64_t own_pid_namespace() noexcept {
  struct stat found {};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

struct flock byte_of(std::uint32_t at) noexcept {
  struct flock byte {};
  byte.l_type = F_WRLCK;
  byte.l_whence = SEEK_SET;
  byte.l_start = static_cast<off_t>(at);
  byte.l_len = 1;
  return byte;
}

}  // namespace

rank_process this_process() noexcept {
  return {::getpid(), start_of("self"), own_pid_namespace()};
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
    if (which.pid_namespace != own_pid_namespace()) {
      return false;
    }
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, which.pid, 0));
    if (pidfd_ < 0) {
      return errno == ESRCH;
    }
    // The pidfd is ours first: if its number had passed to another process by then, the starts differ.
    auto const start = start_of(std::to_string(which.pid));
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

bool take_byte(int file, std::uint32_t at) noexcept {
  auto byte = byte_of(at);
  return ::fcntl(file, F_OFD_SETLK, &byte) == 0;
}

bool is_taken(int file, std::uint32_t at) noexcept {
  auto byte = byte_of(at);
  return ::fcntl(file, F_OFD_GETLK, &byte) != 0 || byte.l_type != F_UNLCK;
}

}  // namespace sluice::nccl_shim
