/// The runtime library behind the gate: opened at the first call that allocates or launches, if the
/// process runs under `sluice run` (SLUICE_RUN is set), and asked once whether this process shares. In one that computes for a
/// server the server's own code is in its place (`offer_memory`).
///
///   due ──first call with a context current──► attaching ──table──► sharing
///                                                        └──none──► straight for ever
///
/// While one thread attaches, others that come to the same point wait for it; the attaching thread
/// itself, and exempt threads, pass straight, so the runtime may call the driver meanwhile. A
/// forked child never attaches.
#pragma once

#include <cstdint>

#include "abi/gate_api.h"

namespace sluice::gate {

/// Attaches if that is due. False if it is, but no context is current yet.
bool attach_if_due();

/// Has calls that concern memory answered by that table, in a process that is not under `sluice run`. False in another, and
/// if that has been done before.
[[nodiscard]] bool offer_memory(sluice_runtime_api const* of);

/// The runtime's table for a call that concerns memory, after attaching if that is due; nullptr:
/// the driver answers.
[[nodiscard]] sluice_runtime_api const* sharing_runtime();

/// Whether that address lies in the pool's memory. Never attaches: before that there is none.
[[nodiscard]] bool is_pool_memory(std::uint64_t address);
/// Whether it lies in memory that the runtime of a process under `sluice run` maps, which calls the driver past the gate. A
/// server's own code maps its pool through the gate.
[[nodiscard]] bool is_mapped_by_runtime(std::uint64_t address);

/// Somebody is held in that call since then (CLOCK_MONOTONIC) while memory is not there: leaves word with the runtime.
void want_launch(symbol held_in, std::int64_t since_ns);

/// The device of the current context, as the runtime knows it.
[[nodiscard]] int sharing_device();

}  // namespace sluice::gate
