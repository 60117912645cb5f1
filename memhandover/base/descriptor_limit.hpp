/// A pool on a GPU has a descriptor for every chunk, more than a process may usually open.
#pragma once

#include <cstddef>

namespace sluice::memhandover {

/// Raises the soft limit of open files by `count`, so that the process itself can open as many as
/// before; the hard limit bounds it. Throws `unsupported`, saying what to do, if the hard limit does
/// not leave room for `count` beside what is open now.
void make_room_for_descriptors(std::size_t count);

/// Raises the soft limit to the hard one.
void raise_descriptor_limit() noexcept;

/// The soft limit.
[[nodiscard]] std::size_t descriptor_limit() noexcept;
/// Whether so many more may be opened now.
[[nodiscard]] bool can_open(std::size_t count) noexcept;

}  // namespace sluice::memhandover
