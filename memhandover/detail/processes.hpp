/// Processes by identity rather than by number alone, and who among them holds a pipe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "memhandover/unique_fd.hpp"

namespace sluice::memhandover::detail {

/// The process that a folder of /proc is about; nothing if it is about none.
[[nodiscard]] std::optional<int> pid_of(std::filesystem::path const& folder);

/// A pidfd of the process with this pid and start time; empty if it has ended, or its number is
/// another's by now.
[[nodiscard]] unique_fd open_process(int pid, std::uint64_t start_ticks);

/// Inode of an open descriptor, 0 if it has none.
[[nodiscard]] std::uint64_t inode_of(int fd);

/// Kills every other process of this user that has the pipe with this inode open; returns how many
/// there were. These are the forked descendants of a client that has died.
int end_holders(std::uint64_t pipe_inode);

}  // namespace sluice::memhandover::detail
