/// A process that dies between two writes to shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace sluice::memhandover::trials {

/// Runs `what` in a child process that kills itself instead of its write number `survived` + 1 to
/// `memory`, which is shared and begins at a page. Returns whether it came to that; else `what` ran
/// to its end. What else the child does is lost with it. Throws `std::runtime_error` if there is no
/// child to be had or it fails otherwise.
bool dies_after_writes(std::span<std::byte> memory, std::uint32_t survived,
                       std::function<void()> const& what);

}  // namespace sluice::memhandover::trials
