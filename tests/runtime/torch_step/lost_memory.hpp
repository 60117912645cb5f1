/// What becomes of a micro-batch whose memory goes, without a pool: what it has allocated is written
/// over, and launches of a commit that does not count are left out.
#pragma once

#include <cstdint>
#include <set>

namespace sluice::testing {

/// From now on torch's memory of the CPU is watched: what is made while the script says that the
/// thread is in the arena belongs to the micro-batch that runs.
void watch_memory();
/// Another micro-batch begins.
void forget_memory();
/// Somebody else writes into the memory of the one that runs.
void overwrite_memory();
/// Its allocations that live.
[[nodiscard]] std::uint64_t living_allocations();

/// Whether operators that write into tensors with dimensions are left out. Scalars stand for tensors
/// on the host.
void drop_launches(bool drop);
/// Addresses into which operators that were left out would have written; forgets them.
[[nodiscard]] std::set<void*> dropped_writes();

}  // namespace sluice::testing
