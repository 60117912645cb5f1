/// Collectives in CUDA graphs: recorded with a capture, agreed on when the graph is launched.
///
///   call ──its stream is being captured──► NCCL records it ──► the gate carries it ──► a launch: one number
///
/// Capturing launches nothing, so that nobody is asked. Thread-safety: everything may be called from any
/// thread; what is known of a graph does not change.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "nccl_shim/collective.hpp"
#include "nccl_shim/pending_calls.hpp"

namespace sluice::nccl_shim {

/// What a graph holds, as the gate carries it.
struct graph_calls {
  collective first;
  std::shared_ptr<known_communicator> of;  ///< its
  bool is_one;          ///< all ranks of that communicator take part in each, and no others
  numbered_call alike;  ///< what ranks must mean alike by a launch
};

/// Makes a call, or a group of some, as part of the graph that is being captured on its stream. Nothing
/// if there is none.
[[nodiscard]] std::optional<int> capture(std::span<collective const> calls,
                                         std::shared_ptr<known_communicator> const& of);

/// As `sluice_agreement` says of them.
[[nodiscard]] void* join_graphs(void* one, void* other);
void release_graph(void* held);

}  // namespace sluice::nccl_shim
