/// Ends trainers, server and broker of a pool by SIGKILL at random instants, and looks at the ledger
/// after each: what the dead held must come free, and everybody else must go on.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/kills_roles.hpp"
#include "memhandover/broker/broker_launch.hpp"

namespace sluice::bench {

struct kills_options {
  memhandover::broker_options broker;
  role_options role;
  std::vector<std::string> trainer;  ///< a command instead of this program's role
  std::uint64_t server_bytes = 0;
  int trainers = 3;
  int kills = 1000;
  int seconds = 240;
  int most_delay_ms = 10;
  unsigned seed = 1;
};

/// Returns counts, and one sample a kill of what was timed. Throws what the start of the pool
/// throws.
[[nodiscard]] nlohmann::json run_kills(kills_options const& how);

}  // namespace sluice::bench
