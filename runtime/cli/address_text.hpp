/// `sluice pool show --address`: what lay at an address, when, and who got its memory.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace sluice::cli {

/// An address as people copy it: hexadecimal digits, with or without 0x, a `_` among them or not.
/// Throws `invalid_argument` if `text` is none.
[[nodiscard]] std::uint64_t parse_address(std::string const& text);

/// A paragraph for each stay, pool by pool, from what query_address returns.
[[nodiscard]] std::string address_text(nlohmann::json const& story);

}  // namespace sluice::cli
