/// What a command has to say.
#pragma once

#include <string>

namespace sluice::cli::detail {

/// Writes to standard output. Throws `unavailable` where that cannot be written (a full disk): then the command has failed.
void print(std::string const& text);

}  // namespace sluice::cli::detail
