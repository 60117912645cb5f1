/// How many files a broker may open: what it needs for itself, and for each process in its pools. Who is turned away hears
/// whose limit it was, which is not his own.
#pragma once

#include "memhandover/base/error.hpp"

namespace sluice::memhandover::detail {

/// Throws `unavailable` if there is no room for a pool and a process in it.
void require_open_files();

/// Throws `too_few_open_files` if there is no room for what the broker opens for another process.
void require_room_for_another();

[[nodiscard]] error too_few_open_files();

}  // namespace sluice::memhandover::detail
