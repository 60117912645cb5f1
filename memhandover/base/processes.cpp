#include "memhandover/base/processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/base/wire.hpp"
#include "posix/process_facts.hpp"

namespace sluice::memhandover {
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
  return parse_number<int>(folder.filename().string());
}

process_identity this_process() {
  return {::getpid(), process_start_ticks(::getpid()), posix::pid_namespace_of("self")};
}

process_identity identity_of(int pid) {
  process_identity found{pid, process_start_ticks(pid),
                         posix::pid_namespace_of(std::to_string(pid))};
  std::ifstream status{"/proc/" + std::to_string(pid) + "/status"};
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("NSpid:", 0) == 0) {  // from the outermost namespace that is seen to its own
      found.pid = std::atoi(line.substr(line.find_last_of(" \t") + 1).c_str());
    }
  }
  return found;
}

bool is_stopped(process_identity const& who) {
  return !is_foreign(who) && process_start_ticks(who.pid) == who.start_ticks &&
         posix::is_stopped(std::to_string(who.pid));
}

bool is_foreign(process_identity const& who) {
  static auto const own = posix::pid_namespace_of("self");
  return who.pid_namespace != 0 && own != 0 && who.pid_namespace != own;
}

unique_fd own_pidfd() {
  return beside_standard_streams(
      unique_fd{static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))});
}

bool is_pidfd(int fd) {
  std::ifstream info{"/proc/self/fdinfo/" + std::to_string(fd)};
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("Pid:", 0) == 0) {
      return true;
    }
  }
  return false;
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

}  // namespace sluice::memhandover
