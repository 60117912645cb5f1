/// What lay at an address of a client of the pool, when, and who got its memory afterwards; as the
/// JSON that `sluice pool show --address` prints. docs/operations.md names the fields.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// Reads the histories of all slots, also of processes that have ended. The newest `stays` come
/// first, so that they fit into one message at most sixteen. Addresses are each process's own, and
/// CUDA gives many processes the same ones: with a `pid` other than 0 that process's alone counts.
[[nodiscard]] nlohmann::json describe_address(ledger_view const& view, std::uint64_t address,
                                              std::uint32_t pid = 0);

}  // namespace sluice::memhandover
