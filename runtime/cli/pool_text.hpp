/// `sluice pool`: who holds which chunk and what for, and which pools there are.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "memhandover/broker/pool_search.hpp"

namespace sluice::cli {

/// How scattered the free chunks are, from the `runs` that query_chunks returns: `chunks` that are
/// free or dirty, the `longest_run` of neighbours among them, and `fragmentation`, the share that
/// lies outside of it (0 where nothing is free).
[[nodiscard]] nlohmann::json free_summary(nlohmann::json const& runs);

/// Pool by pool a letter for every chunk, a table of who holds how much for what, and the latest
/// handovers. Shows `-` for what the JSON does not have.
[[nodiscard]] std::string pool_text(nlohmann::json const& pools);

/// The pools of a machine as JSON, an object each, and as a table.
[[nodiscard]] nlohmann::json pool_list(std::vector<memhandover::found_pool> const& pools);
[[nodiscard]] std::string pool_list_text(nlohmann::json const& list);

}  // namespace sluice::cli
