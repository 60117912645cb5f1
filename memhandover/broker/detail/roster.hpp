/// Who uses the pools of a broker, written down, so that a successor knows whom to wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memhandover/broker/detail/kept_pool.hpp"

namespace sluice::memhandover::detail {

/// One pool of the roster.
struct roster_entry {
  std::uint64_t pool_id = 0;
  nlohmann::json users;  ///< as kept_pool::users tells
};

/// Replaces the roster of a runtime folder; a failure is logged.
void write_roster(std::string const& runtime_dir, std::vector<roster_entry> const& pools);

/// Whether one of its users lives, or cannot be seen.
[[nodiscard]] bool is_in_use(roster_entry const& pool);

/// The pools of the last roster that are in use, in its order.
[[nodiscard]] std::vector<roster_entry> pools_in_use(std::string const& runtime_dir);

}  // namespace sluice::memhandover::detail
