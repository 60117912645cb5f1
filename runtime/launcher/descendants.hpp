/// Ends what a command has left behind.
#pragma once

#include <sys/types.h>

#include <vector>

namespace sluice::launcher {

/// The caller's direct children, those included that are gone but not waited for.
[[nodiscard]] std::vector<pid_t> children_of_this_process();

/// Whether a process is `ancestor`, or descends from it by parents that live. One that is gone is nobody's.
[[nodiscard]] bool is_of_tree(pid_t pid, pid_t ancestor);

/// Whether a process is a broker: it serves others too, so whoever started it does not end it.
[[nodiscard]] bool is_broker(pid_t pid);

/// Kills and waits for every descendant of the caller, which must be a child subreaper. What may
/// not be killed (another user's process) is told in a warning and left.
void end_descendants();

}  // namespace sluice::launcher
