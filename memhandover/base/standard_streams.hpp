/// Standard input, output and error may be closed: daemons and cron do that. The next descriptors that
/// are opened then have their numbers, and what is printed goes into a socket.
#pragma once

#include <utility>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {

/// Opens /dev/null in the place of each of the three that is closed, until the next program is executed,
/// which finds them closed again. For a program of ours, before it opens anything.
void occupy_standard_streams() noexcept;

/// The same open file by a descriptor that is none of the three, for a library in another's process. Empty, with
/// `errno`, if there is no other to be had.
[[nodiscard]] unique_fd beside_standard_streams(unique_fd fd) noexcept;

/// A pipe that is closed on exec, reading end first, with descriptors that are none of the three. Throws
/// `unavailable`, naming what it is for.
[[nodiscard]] std::pair<unique_fd, unique_fd> make_pipe(char const* what_for);

}  // namespace sluice::memhandover
