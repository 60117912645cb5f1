#include "memhandover/detail/processes.hpp"

#include <dirent.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "memhandover/detail/waiting.hpp"
#include "memhandover/error.hpp"
#include "memhandover/wire.hpp"

namespace sluice::memhandover::detail {
namespace {

namespace fs = std::filesystem;

/// Empty if the process has ended. That it cannot be watched is another thing: then nobody knows.
unique_fd pidfd_of(int pid) {
  unique_fd process{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
  if (!process && errno != ESRCH) {
    throw error{error_kind::unavailable,
                "cannot watch process " + std::to_string(pid) + ": " + std::strerror(errno)};
  }
  if (process) {
    if (is_ready(process.get(), POLLIN)) {  // it has exited
      process.reset();
    }
  }
  return process;
}

/// Whether one of a process's descriptors is a pipe's write end. The mode of the link in /proc is
/// that of the open file.
bool holds_write_end(fs::path const& descriptors, std::string const& link) {
  std::error_code unreadable;  // a process may end, or be another user's, while it is looked at
  for (auto entry = fs::directory_iterator{descriptors, unreadable};
       !unreadable && entry != fs::directory_iterator{}; entry.increment(unreadable)) {
    std::error_code gone;
    if (fs::read_symlink(entry->path(), gone) == link &&
        (entry->symlink_status(gone).permissions() & fs::perms::owner_write) != fs::perms::none) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::optional<int> pid_of(fs::path const& folder) {
  auto const name = folder.filename().string();
  int pid = 0;
  auto const parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
  bool const is_number = parsed.ec == std::errc{} && parsed.ptr == name.data() + name.size();
  return is_number ? std::optional{pid} : std::nullopt;
}

unique_fd open_process(int pid, std::uint64_t start_ticks) {
  if (pid <= 0) {
    return {};
  }
  auto process = pidfd_of(pid);
  // The pidfd is ours first: if the number had passed to another process by then, the start times
  // differ.
  if (process && process_start_ticks(pid) != start_ticks) {
    process.reset();
  }
  return process;
}

std::uint64_t inode_of(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

int end_holders(std::uint64_t pipe_inode) {
  if (pipe_inode == 0) {
    return 0;
  }
  auto const link = "pipe:[" + std::to_string(pipe_inode) + "]";
  int found = 0;
  std::error_code failed;
  for (auto const& entry : fs::directory_iterator{"/proc", failed}) {
    auto const pid = pid_of(entry.path());
    if (!pid || *pid == ::getpid()) {
      continue;
    }
    try {
      auto const process = pidfd_of(*pid);
      if (process && holds_write_end(entry.path() / "fd", link)) {
        ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0);
        ++found;
      }
    } catch (error const&) {
      ++found;  // it may be one: look again
    }
  }
  return found + (failed ? 1 : 0);
}

}  // namespace sluice::memhandover::detail
