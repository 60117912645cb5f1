/// The communicators of this process, and how their calls are made.
///
///   call ──► [group] ──► the gate's queue ──its turn──► asked ──agreed──► NCCL
///                                              ▲   │
///                            the gate opens    └───┘ it closes: the question is taken back
///
/// Without a gate, and outside of `sluice run`, everything goes to NCCL at once. So do calls of
/// communicators whose ranks cannot agree, those made by other means than `join` for one: they pass the gate in
/// their turn.
///
/// Thread-safety: everything may be called from any thread, as far as NCCL allows it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "abi/nccl_abi.hpp"
#include "nccl_shim/agreement/rank_group.hpp"
#include "nccl_shim/calls/collective.hpp"

namespace sluice::nccl_shim {

/// Whether calls are to be looked at: there is a gate, and the calling thread is not inside of NCCL.
[[nodiscard]] bool is_watching() noexcept;

/// Whether the address lies in memory of the pool.
[[nodiscard]] bool holds(void const* address) noexcept;

/// Waits until all calls have been made that were left to the gate.
void flush() noexcept;

/// To be called before a communicator is made: `key` is what all its ranks know, and no others.
[[nodiscard]] std::unique_ptr<rank_group> join(std::string const& key);
/// And after: from now on its calls are agreed on if all its ranks have joined.
void enlist(communicator made, std::unique_ptr<rank_group> of);
/// The key of what is split off; nothing if the parent's ranks do not agree.
[[nodiscard]] std::optional<std::string> key_of_child(communicator parent, int colour);

/// Makes a call, or a group of some, in its turn.
[[nodiscard]] int submit(std::span<collective const> calls);
/// The error that the calls of a communicator have left; `success` if none.
[[nodiscard]] int error_of(communicator which) noexcept;
/// Ends the waits for it, for good: NCCL is not called about it any more. Returns when it is not, or after a second:
/// what NCCL is in the middle of then may be ended by its abort alone.
void give_up(communicator which) noexcept;
/// It has been given up and is about to go: of it is only known that it may not be called, until there is another one
/// at its address.
void bury(communicator which) noexcept;
/// It is about to go.
void forget(communicator which) noexcept;

}  // namespace sluice::nccl_shim
