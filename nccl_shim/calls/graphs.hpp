/// Collectives in CUDA graphs: recorded with a capture, agreed on when the graph is launched.
///
///   call ──its stream is being captured──► NCCL records it ──► the gate carries it ──► a launch: one number,
///                                                                     or an exchange, as a group would be
///
/// Capturing launches nothing, so that nobody is asked. Thread-safety: everything may be called from any
/// thread; what is known of a graph does not change.
#pragma once

#include <vector>

#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/exchange_part.hpp"

namespace sluice::nccl_shim {

/// What a graph holds, as the gate carries it.
struct graph_calls {
  collective first;
  bool is_one;          ///< all ranks of its communicator take part in each, and no others
  numbered_call alike;  ///< what ranks must mean alike by a launch, if so; else what it is called
  std::vector<exchange_part> parts;  ///< the first's communicator first
};

/// As `sluice_agreement` says of them.
[[nodiscard]] void* join_graphs(void* one, void* other);
void release_graph(void* held);

}  // namespace sluice::nccl_shim
