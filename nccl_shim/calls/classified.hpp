/// What a call is, or a group of some, or the launch of a graph that holds some: found out once, all that follows goes by it.
///
///   classify ─┬─► at once     the thread is inside the gate; it becomes numbered if somebody has to be asked
///             ├─► captured    NCCL records it, and launches of the graph are classified
///             ├─► refused     it is not made
///             ├─► numbered    in its turn all ranks of its communicator are asked
///             ├─► exchange    in its turn those at its other ends are
///             └─► passing     in its turn nobody is: they cannot be
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/communicators.hpp"
#include "nccl_shim/calls/exchange_part.hpp"
#include "nccl_shim/calls/graphs.hpp"
#include "nccl_shim/calls/known_communicator.hpp"

namespace sluice::nccl_shim {

/// At a micro-batch: the communicator that it ends with, and the epoch of that in which it made its first call.
struct attempt {
  std::shared_ptr<known_communicator> domain;
  std::uint16_t epoch;
};

/// Nothing lies before it: the calling thread has been let inside the gate. What is known stays while this lives.
struct at_once_group {
  submission_under_way now;
  known_communicator* of;
  cut* agreement;
};

/// It becomes part of the graph that is being captured.
struct captured_group {
  std::shared_ptr<known_communicator> first;
  std::unique_ptr<graph_calls> held;
};

struct refused_group {
  int result;
  /// Why it cannot be part of a micro-batch; nullptr: there is trouble, which has been told.
  char const* why_not_inside = nullptr;
};

/// A number of its communicator, whose ranks agree.
struct numbered_group {
  std::shared_ptr<known_communicator> of;
  std::optional<attempt> place = std::nullopt;  ///< of what is part of a micro-batch
};

/// Of communicators whose ranks can notify each other.
struct exchange_group {
  std::vector<exchange_part> parts;
};

struct passing_group {
  std::shared_ptr<known_communicator> first;
  /// It is an exchange, not all of whose ends can notify each other; else the communicator's ranks do not agree.
  bool is_exchange;
};

/// Of the launch of a graph, and of what the calling thread's micro-batch has.
using kind_of_launch = std::variant<refused_group, numbered_group, exchange_group, passing_group>;
using kind_of_group = std::variant<at_once_group, captured_group, refused_group, numbered_group,
                                   exchange_group, passing_group>;

/// Of calls of the calling thread.
[[nodiscard]] kind_of_group classify(std::span<collective const> calls);
/// Of a launch of that graph.
[[nodiscard]] kind_of_launch classify(graph_calls const& graph);

}  // namespace sluice::nccl_shim
