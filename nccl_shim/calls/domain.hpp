/// Micro-batches in which ranks work together: what they may call, and which attempt at one a call belongs to.
///
/// The *domain* is the communicator of all ranks that work together. Micro-batches end with numbers of it, and its epoch
/// is that of the attempts: calls of other communicators, whose ranks are some of its own, belong to it, too.
///
///   the domain's epoch   t ────────────────────────────────► t + 1, whoever runs its micro-batch again
///   another's            … ──raised by a call──► t ─────raised by whoever sees that──────► t + 1
///
/// Another communicator's epoch follows the domain's, never the other way round: who finds its own attempt dropped in
/// one finds it dropped in all.
///
/// Thread-safety: everything may be called from any thread; those that take a micro-batch from the one that trains.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "abi/nccl_abi.hpp"
#include "nccl_shim/calls/classified.hpp"

namespace sluice::nccl_shim {

/// Whether micro-batches may call what needs agreement.
void allow_inside_micro_batches(bool allow) noexcept;

/// Makes it the domain, if its ranks agree. Until then, and when it has gone, it is the first communicator that is used.
[[nodiscard]] bool make_domain(communicator which,
                               std::shared_ptr<known_communicator> const& known);
/// nullptr: none has been used.
[[nodiscard]] std::shared_ptr<known_communicator> the_domain();
/// It is about to go.
void forget_domain(communicator which) noexcept;

/// A call of a communicator's, a group, or the launch of a graph: numbered, with what it belongs to, or refused.
/// `is_one`: all ranks of that communicator take part in each call of it, and no others.
[[nodiscard]] kind_of_launch inside_micro_batch(std::uint64_t micro_batch, bool is_one,
                                                communicator which,
                                                std::shared_ptr<known_communicator> const& known);
/// What its end belongs to; nothing if there is no domain.
[[nodiscard]] std::optional<attempt> end_of_micro_batch(std::uint64_t micro_batch);

}  // namespace sluice::nccl_shim
