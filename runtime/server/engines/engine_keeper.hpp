/// The process between the server and an engine: it starts the engine's command, and ends all that came of it, whichever of
/// the three goes first. It has one end of a Unix socket of messages; the server has the other (engine_process.hpp).
///
///   server → keeper   {"type": "run", "command": […], "environment": ["NAME=value"], "folder": "/…"} + the log's descriptor
///                     {"type": "stop"}                          SIGTERM to the engine's process group
///   keeper → server   {"type": "started", "pid": 4711}
///                     {"type": "ended", "text": "ended with exit code 1"}     all of it has ended
///
/// The end of the conversation ends the engine at once, so that a server that is killed leaves none behind.
#pragma once

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

/// Returns the exit code of the keeper's own program. Call before any thread exists: it becomes a child subreaper and changes its
/// signals.
[[nodiscard]] int keep_engine(memhandover::unique_fd server);

}  // namespace sluice::server
