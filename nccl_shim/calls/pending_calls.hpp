/// How calls and launches are made, each kind in its way. Most wait in the gate's queue until others have agreed to them:
///
///   handed over ──ask──► asked ──granted──► made
///                  ▲       │  └──dropped──► its micro-batch runs again
///                  └───────┘ the gate closes: withdrawn
///
/// Thread-safety: a question is one thread's at a time, the gate sees to that.
#pragma once

#include <span>

#include "abi/gate_api.h"
#include "nccl_shim/calls/classified.hpp"
#include "nccl_shim/calls/collective.hpp"

namespace sluice::nccl_shim {

/// Makes calls of the calling thread that are of that kind: at once, or in their turn.
[[nodiscard]] int make(std::span<collective const> calls, at_once_group one);
[[nodiscard]] int make(std::span<collective const> calls, captured_group one);
[[nodiscard]] int make(std::span<collective const> calls, numbered_group one);
[[nodiscard]] int make(std::span<collective const> calls, exchange_group one);
[[nodiscard]] int make(std::span<collective const> calls, passing_group one);

/// The launch of a graph of that kind, as the gate is to make it instead.
[[nodiscard]] sluice_agreed_call as_agreed(numbered_call const& graph, numbered_group one,
                                           sluice_graph_launch const& launch);
[[nodiscard]] sluice_agreed_call as_agreed(numbered_call const& graph, exchange_group one,
                                           sluice_graph_launch const& launch);

/// Asks the other ranks to keep that micro-batch; calls `keep` when they have agreed. False if they have
/// dropped it.
[[nodiscard]] bool hand_over_end(attempt const& at, void (*keep)(void* of), void* keep_of);

}  // namespace sluice::nccl_shim
