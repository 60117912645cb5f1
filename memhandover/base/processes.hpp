/// Processes by identity rather than by number alone, and who among them holds a pipe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {

/// The process that a folder of /proc is about; nothing if it is about none.
[[nodiscard]] std::optional<int> pid_of(std::filesystem::path const& folder);

/// What names a process for good: its pid in its own namespace of pids, which one that is, and when it began.
struct process_identity {
  int pid = 0;
  std::uint64_t start_ticks = 0;
  std::uint64_t pid_namespace = 0;  ///< its inode; 0: not known

  /// Whether they may be one: what is not known of one does not tell it from another.
  [[nodiscard]] bool is(process_identity const& other) const noexcept {
    return pid == other.pid && start_ticks == other.start_ticks &&
           (pid_namespace == other.pid_namespace || pid_namespace == 0 || other.pid_namespace == 0);
  }
};

[[nodiscard]] process_identity this_process();
/// Of a process that is seen under this pid, which may be in a namespace below this process's.
[[nodiscard]] process_identity identity_of(int pid);
/// Whether its pid says nothing here: it is of another namespace.
[[nodiscard]] bool is_foreign(process_identity const& who);

/// A pidfd of the process with this pid and start time; empty if it has ended, or its number is
/// another's by now.
[[nodiscard]] unique_fd open_process(int pid, std::uint64_t start_ticks);

/// A pidfd of this process; empty, with `errno`, where that is not allowed.
[[nodiscard]] unique_fd own_pidfd();
/// Whether a descriptor is a pidfd.
[[nodiscard]] bool is_pidfd(int fd);

/// Whether a signal or a debugger has stopped it, as far as that can be seen.
[[nodiscard]] bool is_stopped(process_identity const& who);

/// Inode of an open descriptor, 0 if it has none.
[[nodiscard]] std::uint64_t inode_of(int fd);

/// Kills every other process of this user that has the pipe with this inode open; returns how many
/// there were. These are the forked descendants of a client that has died.
int end_holders(std::uint64_t pipe_inode);

}  // namespace sluice::memhandover
