/// Who holds a pool's memory, in sentences for somebody who could not get any.
///
///   account_of(view, slot);   // "of the pool's 4 GiB this job holds 1 GiB for good and 512 MiB in
///                             // its step arena, models hold 2 GiB (bert 1.5 GiB, resnet 512 MiB),
///                             // and 512 MiB are free"
///   remedies(view, slot);     // "a smaller micro_batch (now 64), …"
///
/// Thread-safety: any thread; reads shared memory alone.
#pragma once

#include <cstdint>
#include <string>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// What each party holds, as the training job in `slot` sees it: itself, the inference server by
/// model (the largest by name), other jobs, engines, what is free, and of that what is kept for cold starts.
[[nodiscard]] std::string account_of(ledger_view const& view, std::uint32_t slot);

/// What would leave the job more memory; names only what applies.
[[nodiscard]] std::string remedies(ledger_view const& view, std::uint32_t slot);

}  // namespace sluice::memhandover
