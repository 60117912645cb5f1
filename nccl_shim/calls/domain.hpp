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
#include <span>

#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/pending_calls.hpp"

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

/// What a call of a micro-batch belongs to, or why it cannot be part of one.
struct place_inside {
  std::optional<attempt> of;
  char const* why_not = nullptr;  ///< if there is none
};
/// A call, or a group of some, of one communicator's ranks.
[[nodiscard]] place_inside inside_micro_batch(std::uint64_t micro_batch,
                                              std::span<collective const> calls,
                                              std::shared_ptr<known_communicator> const& known);
/// What its end belongs to; nothing if there is no domain.
[[nodiscard]] std::optional<attempt> end_of_micro_batch(std::uint64_t micro_batch);

}  // namespace sluice::nccl_shim
