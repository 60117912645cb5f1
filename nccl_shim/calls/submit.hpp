/// How calls are made.
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

#include <span>

#include "abi/gate_api.h"
#include "nccl_shim/calls/collective.hpp"

namespace sluice::nccl_shim {

/// Makes a call, or a group of some, in its turn.
[[nodiscard]] int submit(std::span<collective const> calls);
/// As `sluice_agreement` says of it.
[[nodiscard]] sluice_graph_result agree_on_launch(void* held, sluice_graph_launch const* launch,
                                                  sluice_agreed_call* call);

}  // namespace sluice::nccl_shim
