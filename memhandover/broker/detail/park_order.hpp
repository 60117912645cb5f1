/// Orders of an operator that a job goes to host copies and stays there (`sluice park`), or may come back (`sluice wake`).
///
///   none ──park──► held until it is woken, or for a time ──wake, the time, the end of the job──► none
///
/// Besides what its server says of an engine: whether it answers requests now (`client_entry::in_use`), so that a demand parks one that
/// does not before one that does.
///
/// An order stands in the job's entry of the ledger (`client_entry::held_until_ns`), where the job reads it. So it
/// outlives the broker, and a server that is the writer has nothing to do with it.
///
/// Thread-safety: none; they belong to the broker's one thread, which alone writes entries.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::detail {

/// Orders it of the job that `question` names by `slot` and `pid`, for `for_ms` milliseconds, 0: until it is woken. `copies` is
/// what `copy_keeper::describe` says. Returns the job's slot. Throws `not_found` where there is no such job, `already_exists` where the
/// order stands, `out_of_memory` where host copies could take nothing, and why it may not be parked.
std::uint32_t order_park(ledger_view const& view, nlohmann::json const& question,
                         nlohmann::json const& copies);

/// Ends the order, and has the job come back if it is away for whatever reason. Returns the job's slot. Throws `not_found` where
/// there is no such job, or one that is neither ordered to be away nor is.
std::uint32_t order_wake(ledger_view const& view, nlohmann::json const& question);

/// Notes what `question` says by `in_use` of the engine that it names by `slot` and `pid`. Throws `not_found` where there is no such one,
/// `unsupported` for a job, which always works.
void mark_use(ledger_view const& view, nlohmann::json const& question);

}  // namespace sluice::memhandover::detail
