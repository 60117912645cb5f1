/// Who gives next, and how much, when memory is demanded from tenants. Pure: what they have comes in, and whom to ask comes out.
///
/// Tenants of a *rank* give all that they can before those of the next one are asked: training before engines, jobs of lower priority
/// first, engines that rest before those that answer requests, of these those whose memory need not be copied. Within a rank what
/// costs a micro-batch goes before what has to be parked, and who has most of it first; who is parked gives what it has
/// beside that with the same demand. No demand takes a tenant's minimum.
///
///   while (auto const next = next_demand(givers, missing)) {
///     ask(next->slot, next->chunks, next->may_park);
///     // … wait for the answer, bring `givers` and `missing` up to date …
///   }
///
/// Thread-safety: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {

/// What a tenant has, in chunks.
struct holdings_of_tenant {
  std::uint32_t held = 0;
  std::uint32_t kept = 0;      ///< of these: that go by parking alone, or not at all
  std::uint32_t parkable = 0;  ///< of those kept, what could be parked now
  std::uint32_t least = 0;     ///< its minimum
};

/// What of that demands could have.
struct giveable {
  std::uint32_t at_once = 0;  ///< without parking it
  std::uint32_t parked = 0;   ///< beyond that

  [[nodiscard]] std::uint32_t all() const noexcept { return at_once + parked; }
  bool operator==(giveable const&) const = default;
};

[[nodiscard]] giveable giveable_of(holdings_of_tenant const& tenant) noexcept;

/// One that may be asked.
struct giver {
  std::uint32_t slot = 0;
  turn_in_handovers turn = turn_in_handovers::first;
  priority rank = priority::normal;
  bool in_use = false;     ///< an engine that answers requests
  bool is_copied = true;   ///< what goes of it
  std::uint32_t most = 0;  ///< more is not demanded: what it holds above its minimum, if it has one
  giveable has{};
};

struct next_asked {
  std::uint32_t slot = 0;
  std::uint32_t chunks = 0;
  bool may_park = false;

  bool operator==(next_asked const&) const = default;
};

/// Whom to ask for what of `missing` chunks; nothing where nobody can give any, or none are missing. One that alone can give is asked
/// for all that is missing: it may have come to keep less than it has said.
[[nodiscard]] std::optional<next_asked> next_demand(std::span<giver const> givers,
                                                    std::uint32_t missing);

}  // namespace sluice::memhandover
