/// Log lines go to standard error, one event a line: time, level, program and pid, then a sentence
/// with its values as key=value.
///
///   telemetry::set_up_logging("sluice-server", "info");
///   spdlog::info("listening host={} port={}", host, port);
///   // 2030-01-31T12:00:00.000000Z info sluice-server[4711] listening host=127.0.0.1 port=8000
///
/// SLUICE_LOG sets the level: trace, debug, info, warn, error or off. Times are UTC, so that the
/// lines of several processes can be merged.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace spdlog {
class formatter;
}

namespace sluice::telemetry {

/// Replaces spdlog's default logger. An unknown level in SLUICE_LOG is told in a warning, and
/// `default_level` used. Call once, before other threads log.
void set_up_logging(std::string const& program, std::string_view default_level);

/// Writes lines as the program's log has them, for whoever writes some elsewhere.
[[nodiscard]] std::unique_ptr<spdlog::formatter> make_line_formatter();

/// `text` in double quotes with `"`, `\` and control characters escaped, for a value that may
/// contain spaces.
[[nodiscard]] std::string quoted(std::string_view text);

}  // namespace sluice::telemetry
