/// What a ledger says, as the JSON that `sluice status` prints. docs/operations.md names the
/// fields.
#pragma once

#include <nlohmann/json.hpp>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

[[nodiscard]] nlohmann::json describe_pool(ledger_view const& view);

/// Neighbouring chunks with one owner that hold the same, from chunk `from` on: `runs` of `first`,
/// `count`, `owner`, and `slot` and `holds` (null: not said) of those that are owned. After
/// `most_runs` of them `next` is the chunk to go on from, else null.
[[nodiscard]] nlohmann::json describe_chunks(ledger_view const& view, std::uint32_t from,
                                             std::size_t most_runs);

}  // namespace sluice::memhandover
