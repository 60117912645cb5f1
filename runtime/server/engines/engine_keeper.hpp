/// The process between a server and an engine: it starts the engine's command, waits for its end, and ends all that came of it. It has
/// one end of a Unix socket of messages; the server has the other (engine_process.hpp). It outlives a server that leaves the engine to
/// its successor, whom it meets at a socket of its own:
///
///   owned ──leave──► offered ──adopt──► owned, by the successor
///     │                 │
///     │ its owner       │ nobody has it, and nobody has come for `patience_ms`
///     ▼ goes            ▼
///   ended             ended                    the first at once, the second after SIGTERM and 2 s
///
///   server → keeper      {"type": "run", "command": […], "environment": ["NAME=value"], "folder": "/…", "meeting": "/…",
///                         "patience_ms": 60000, "identity": …, "address": {…}, "log": "/…", "log_begin": 0} + the log's descriptor
///                        {"type": "stop"}                          SIGTERM to the engine's process group
///                        {"type": "end"}                           all of it ends at once
///                        {"type": "leave", "notes": …}             a successor may have it; this server uses it until it hangs up
///   keeper → server      {"type": "started", "pid": 4711}
///                        {"type": "ended", "text": "ended with exit code 1"}     all of it has ended; to whoever is there
///   keeper → successor   {"type": "who", "identity": …, "address": …, "log": …, "log_begin": …, "pid": 4711}
///   successor → keeper   {"type": "adopt"}                         it waits for its turn
///   keeper → successor   {"type": "yours", "notes": …, "shared": true}   whether one that has left uses it still
///                        {"type": "alone"}                               none does any more
///
/// An owner that goes without a word ends the engine, so that a server that is killed leaves none behind; but not where a successor waits
/// for it, or a predecessor uses it still: then it is offered again.
#pragma once

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

/// Returns the exit code of the keeper's own program. Call before any thread exists: it becomes a child subreaper and changes its
/// signals.
[[nodiscard]] int keep_engine(memhandover::unique_fd server);

}  // namespace sluice::server
