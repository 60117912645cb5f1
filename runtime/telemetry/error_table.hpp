/// The one table from kinds of failure to what the outside world sees of them.
///
///   try {
///     respond(200, answer());
///   } catch (error const& why) {
///     respond(telemetry::http_status(why.kind()), why.what());
///   }
///
/// Exit codes are those of `sluice` and `sluice-server`; `sluice run` returns its command's code
/// instead, and 125 for a failure of its own. Everything here is constant: any thread.
#pragma once

#include "memhandover/base/error.hpp"

namespace sluice::telemetry {

/// Never fail: a kind that is not in the table counts as `internal`.
[[nodiscard]] int http_status(error_kind kind) noexcept;
[[nodiscard]] int exit_code(error_kind kind) noexcept;

/// Exit code of a launcher's own failure, and of a command that cannot be run or found, as shells
/// and container engines have them.
inline constexpr int exit_launcher_failed = 125;
inline constexpr int exit_not_executable = 126;
inline constexpr int exit_not_found = 127;
/// Added to the number of the signal that ended a command.
inline constexpr int exit_signal_base = 128;

}  // namespace sluice::telemetry
