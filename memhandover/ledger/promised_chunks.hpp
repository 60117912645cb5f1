/// Which chunks a client will give to a demand, said as soon as it has chosen them: what it has to copy out first takes a while, and the
/// server maps them meanwhile.
///
///   promise(view, slot, number, chunks);                 // the client, of that demand
///   auto const foreseen = promised(view, slot, number);  // the server; nothing before that
///
/// It may come otherwise: a client that finds no room for a chunk's contents keeps it.
///
/// Thread-safety: `promise` one thread of the client, `promised` any.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// Chunks that do not exist are left alone.
void promise(ledger_view const& view, std::uint32_t slot, std::uint32_t demand,
             std::span<std::uint32_t const> chunks) noexcept;

/// Ascending, and the client's or nobody's, whatever it says; nothing before it has said it.
[[nodiscard]] std::optional<std::vector<std::uint32_t>> promised(ledger_view const& view,
                                                                 std::uint32_t slot,
                                                                 std::uint32_t demand);

}  // namespace sluice::memhandover
