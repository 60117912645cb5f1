/// What a failed system call means to whoever reads the message: the reason, and where it is a limit, which one.
///
///   throw system_error("cannot create a pool of 4 GiB");
///   // … : File too large; the limit of a file's size (ulimit -f) holds for shared memory too:
///   // raise it
#pragma once

#include <cerrno>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {

/// The system's text for an error number, with what would be right where that can be said.
[[nodiscard]] std::string reason_of(int error_number);

/// The error of a call that has just failed, `doing` and its reason. What memory is missing for is
/// `out_of_memory`, what a limit or somebody else's setting forbids `unavailable`, the rest `otherwise`.
[[nodiscard]] error system_error(std::string const& doing,
                                 error_kind otherwise = error_kind::unavailable,
                                 int error_number = errno);

/// Throws it; the rest is `internal`.
[[noreturn]] void throw_system_error(std::string const& doing);

/// A path as a word of a shell's command line, quoted where it must be.
[[nodiscard]] std::string shell_word(std::string const& path);

}  // namespace sluice::memhandover
