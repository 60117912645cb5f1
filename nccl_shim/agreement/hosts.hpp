/// Whether the job of this process spans hosts, by the environment that torchrun gives its ranks, and the
/// store that all of them reach then.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "nccl_shim/agreement/store.hpp"

namespace sluice::nccl_shim {

/// A variable's value; empty without it.
using environment = std::function<std::string(char const* name)>;

struct job_hosts {
  bool several = false;
  std::optional<store::address> store_at;  ///< nothing if `problem` says why
  std::string problem;
};
/// Several hosts if WORLD_SIZE is more than LOCAL_WORLD_SIZE; then a store listens at MASTER_ADDR and
/// MASTER_PORT, and SLUICE_LOST_AFTER says in seconds how long a rank may be silent.
[[nodiscard]] job_hosts hosts_of_job(environment const& variable);

/// This job's, connected to when it is first asked for; nullptr if the job is on one host, or if there is
/// none, which has been said then.
[[nodiscard]] store* store_of_job();

}  // namespace sluice::nccl_shim
