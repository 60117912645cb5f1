/// Whether a pool can promise a job what it asks for as it joins.
///
/// Thread-safety: none; it belongs to the broker's one thread, which alone writes entries.
#pragma once

#include "memhandover/broker/job_wish.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::detail {

/// What a newcomer of that kind has before others. Throws `out_of_memory` with who has been promised what where the minimums of
/// all who live were more than the pool, and `invalid_argument` for a client that is no training job and wishes anything.
[[nodiscard]] job_standing admit(ledger_view const& view, client_traits const& kind,
                                 job_wish const& wish);

}  // namespace sluice::memhandover::detail
