/// What waits in the gate's queue until the ranks of a communicator have agreed to it.
///
///   handed over ──ask──► asked ──granted──► made
///                  ▲       │  └──dropped──► its micro-batch runs again
///                  └───────┘ the gate closes: withdrawn
///
/// Thread-safety: a question is one thread's at a time, the gate sees to that.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "abi/gate_api.h"
#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/known_communicator.hpp"

namespace sluice::nccl_shim {

/// At a micro-batch: the communicator that it ends with, and the epoch of that in which it made its first call.
struct attempt {
  std::shared_ptr<known_communicator> domain;
  std::uint16_t epoch;
};

/// What one communicator has of an exchange: of sends, receives, and collectives that are not all of one communicator.
/// A collective is like a send to, and a receive from, all other ranks.
struct exchange_part {
  std::shared_ptr<known_communicator> of;
  std::vector<transfers> with;  ///< none where its ranks do not agree
};
/// Of each communicator once; `of` are those of the calls, one by one.
[[nodiscard]] std::vector<exchange_part> parts_of(
    std::span<collective const> calls, std::span<std::shared_ptr<known_communicator> const> of);
/// Adds to what there is of each communicator.
void add(std::vector<exchange_part>& all, std::span<exchange_part const> more);

/// Makes a call, or a group of some, of all ranks of that communicator, which agree by `agreement`, if nothing lies before
/// it and nobody has to be asked; nothing: it is to be handed over.
[[nodiscard]] std::optional<int> make_at_once(std::span<collective const> calls,
                                              known_communicator& of, cut& agreement);

/// Hands a call, or a group of some, over to the gate; `place`: as part of a micro-batch.
[[nodiscard]] int hand_over(std::span<collective const> calls,
                            std::shared_ptr<known_communicator> of, std::optional<attempt> place);

/// The same for what has no number, of any communicators whose ranks agree.
[[nodiscard]] int hand_over_exchange(std::span<collective const> calls,
                                     std::vector<exchange_part> parts);
/// The same for what is captured: the graph's launches are asked about, not this.
[[nodiscard]] int hand_over_captured(std::span<collective const> calls,
                                     std::shared_ptr<known_communicator> of);
/// The launch of a graph, as the gate is to make it instead.
[[nodiscard]] sluice_agreed_call as_agreed(numbered_call const& graph,
                                           std::shared_ptr<known_communicator> of,
                                           std::optional<attempt> place,
                                           sluice_graph_launch const& launch);
/// The same where that has no number.
[[nodiscard]] sluice_agreed_call as_exchange(numbered_call const& graph,
                                             std::vector<exchange_part> parts,
                                             sluice_graph_launch const& launch);

/// Asks the other ranks to keep that micro-batch; calls `keep` when they have agreed. False if they have
/// dropped it.
[[nodiscard]] bool hand_over_end(attempt const& at, void (*keep)(void* of), void* keep_of);

}  // namespace sluice::nccl_shim
