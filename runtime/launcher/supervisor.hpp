/// Runs one command as a child, as if it stood in the caller's place: same terminal, same process
/// group, signals passed on, its exit code returned; and nothing of it left behind.
///
///   starting ──exec fails──► (126, 127)
///      └──► running ◄──SIGCONT── stopped     the launcher stops with its child on Ctrl-Z, so that a
///              │                             shell sees it
///              └──child gone──► ending ──no descendant left──► (exit code)
///
/// A signal that the terminal sends reaches the whole process group, so it is not passed on; the
/// kernel marks such a signal. One that a process sent is passed on, since it cannot be told
/// whether it was sent to the group as well.
///
/// The caller becomes a child subreaper (prctl(2)): descendants that left the command's session
/// come to it when their parents die. When the command is gone, they are ended with SIGKILL; so by
/// then is what they held in the pool.
#pragma once

#include <string>
#include <vector>

#include "runtime/launcher/environment.hpp"

namespace sluice::launcher {

/// Runs `command` (not empty; found on PATH) in `env` and returns its exit code: the command's own,
/// 128+n if signal n ended it, 127 if there is no such command, 126 if it cannot be executed.
/// Throws `unavailable` if no process can be started at all. One call per process, before any
/// thread exists: it changes the signal mask of the process.
[[nodiscard]] int supervise(std::vector<std::string> command, environment env);

}  // namespace sluice::launcher
