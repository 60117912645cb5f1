/// What graphs hold that other processes have to agree to, carried from captures to launches.
///
///   attached to a capture ──► graph ──instantiated, updated──► executable ──launched──► agreed on
///                             │  ▲
///                             └──┘ cloned, child of another
///
/// What it is, whoever attaches it knows (`sluice_agreement`); here it is opaque. A capture is the graph
/// that it fills. A handle that the driver gives out is of something new, whatever it stood for before;
/// so a graph that ends without a call (a child that belongs to its parent) leaves nothing behind that
/// matters. What is not seen: graphs in the body of a conditional node, and child graphs that are
/// exchanged inside of an executable or changed through the handle of their node.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <optional>

#include "abi/gate_api.h"
#include "runtime/gate/dispatch.hpp"

namespace sluice::gate {

/// As `sluice_gate_api` says of it.
[[nodiscard]] bool attach_to_capture(CUstream stream, void* held) noexcept;

/// The graph that is being captured on the stream; nullptr if there is none, or the driver cannot tell.
[[nodiscard]] CUgraph captured_graph(stream_use where) noexcept;
/// A capture has ended: its graph, as asked before, and as the driver has given it out. nullptr: none.
void capture_has_ended(CUgraph before, CUgraph after) noexcept;

void graph_is_new(CUgraph graph) noexcept;
void graph_is_copy(CUgraph copy, CUgraph of) noexcept;
void graph_gets_child(CUgraph graph, CUgraph child) noexcept;
template <typename Parameters>
void graph_gets_node(CUgraph graph, Parameters const* of) noexcept {
  if (of != nullptr && of->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    graph_gets_child(graph, of->graph.graph);
  }
}
/// To be called before the driver gives its handle out again.
void graph_goes(CUgraph graph) noexcept;
/// It has been made of that graph, or has become like it.
void executable_is_of(CUgraphExec executable, CUgraph graph) noexcept;
void executable_goes(CUgraphExec executable) noexcept;

/// Launches an executable that holds what needs agreement. Nothing if it holds none: then it is launched
/// like others.
[[nodiscard]] std::optional<CUresult> launch_agreed(gated_call const& call, CUgraphExec executable);

}  // namespace sluice::gate
