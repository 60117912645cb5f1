/// Of a server's published memory, what stays when the server has died: for its successor, for a while.
#pragma once

#include <cstdint>
#include <vector>

#include "memhandover/ledger/ledger_writer.hpp"
#include "memhandover/ledger/manifest.hpp"

namespace sluice::memhandover {

/// The chunks that an entry names, in the order of their addresses.
[[nodiscard]] std::vector<std::uint32_t> chunks_of(manifest_entry const& entry);

/// Whether an entry names memory that a server has left, or that `slot` has taken over: every chunk is
/// serving in the epoch that the entry names.
[[nodiscard]] bool is_left(ledger_view const& view, manifest_entry const& entry,
                           std::uint32_t slot);

/// What the dead server in `slot` has published stays, nobody's, until `until_ns` (CLOCK_MONOTONIC).
/// Returns how many chunks. Call before `ledger_writer::reclaim`.
std::uint32_t leave_published(ledger_view const& view, manifest const& published,
                              ledger_writer& writer, std::uint32_t slot, std::int64_t until_ns);

}  // namespace sluice::memhandover
