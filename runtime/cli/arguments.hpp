/// The command line: from words to the command that they name.
#pragma once

#include <string>
#include <vector>

namespace sluice::cli {

/// Runs the command that `words` (without the program's name) ask for. Returns the exit code; tells
/// failures on standard error, and never throws.
[[nodiscard]] int run_command_line(std::vector<std::string> const& words) noexcept;

}  // namespace sluice::cli
