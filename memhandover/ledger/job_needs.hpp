/// What jobs need that cannot go on, for want of memory, beside jobs of lower priority: these are not granted it, and the server
/// demands it from them. A need stands in its job's mailbox, and only for so long: one that is stopped keeps nobody waiting.
///
///   show_need(mailbox, 12, 1s);        // again and again, as long as it waits
///   beside_needs(view, slot, 20, 3);   // of 20 chunks what that tenant, which holds 3, may have
///   withdraw_need(mailbox);
///
/// Thread-safety: any thread; a mailbox's own client alone shows and withdraws.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {

/// The client needs so many chunks more, for at most that long.
void show_need(mailbox_header& mailbox, std::uint32_t chunks,
               std::chrono::nanoseconds lasts) noexcept;
void withdraw_need(mailbox_header& mailbox) noexcept;

/// Whether there is a live job of lower priority than the one in `slot`; false where that is none.
[[nodiscard]] bool outranks_another(ledger_view const& view, std::uint32_t slot) noexcept;
/// Whether the job in `slot` could have so many chunks more: of what is granted at present, and what jobs of lower priority could give
/// without being parked.
[[nodiscard]] bool could_have(ledger_view const& view, std::uint32_t slot,
                              std::uint32_t chunks) noexcept;
/// Whether a job waits for memory that is of higher priority than the one in `slot`, or of the same and in an earlier slot.
[[nodiscard]] bool waits_behind_another(ledger_view const& view, std::uint32_t slot) noexcept;

/// Chunks that the job in `slot` needs now; 0 where it is none, has ended, or needs none.
[[nodiscard]] std::uint32_t needed_by(ledger_view const& view, std::uint32_t slot) noexcept;
/// Of so many chunks what the tenant in `slot`, which holds `held`, may have beside what jobs of higher priority need; its minimum
/// in any case.
[[nodiscard]] std::uint32_t beside_needs(ledger_view const& view, std::uint32_t slot,
                                         std::uint32_t chunks, std::uint32_t held) noexcept;
/// Of what the writer has published as grantable, what it would grant the tenant in `slot`.
[[nodiscard]] std::uint32_t grantable_to(ledger_view const& view, std::uint32_t slot) noexcept;

/// The job of the highest priority that needs something; of equals the first.
[[nodiscard]] std::optional<std::uint32_t> first_in_need(ledger_view const& view) noexcept;

}  // namespace sluice::memhandover
