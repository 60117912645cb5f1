/// `sluice run`: starts a training command so that it lives in the shared pool.
///
/// It finds or starts the broker, gives the command the environment by which the runtime library
/// and the gate find their way, and stands in for the command until it ends (supervisor.hpp).
/// Serving never stands in training's way: if there can be no pool, the command runs as it would
/// without Sluice, unless `require_pool` says otherwise.
///
///   return launcher::run({.pool_bytes = 4_GiB}, {"python", "train.py"},
///                        launcher::this_installation());
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/device/disk_room.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/launcher/install_layout.hpp"

namespace sluice::launcher {

/// What is not given stays as the environment says (SLUICE_RUNTIME_DIR, SLUICE_POOL_BYTES,
/// SLUICE_BACKEND, SLUICE_DEVICE), else as the broker chooses.
struct run_options {
  std::string runtime_dir{};
  std::string backend{};  ///< "host", "cuda" or "auto"
  std::optional<int> device{};
  std::uint64_t host_copy_bytes = 0;        ///< if this starts the broker
  memhandover::disk_wish host_copy_disk{};  ///< beyond that; the folder is absolute
  std::optional<std::uint64_t> pool_bytes{};
  std::string name{};  ///< shown in status; empty: the runtime library chooses
  std::string role{};  ///< what it is in the ledger: "engine", or empty for training; SLUICE_ROLE
  bool agree = true;   ///< whether ranks agree on their collectives: SLUICE_COLLECTIVES
  /// "low", "normal", "high" or empty: SLUICE_PRIORITY
  std::string priority{};
  /// Bytes, or a percentage of the pool, or empty: SLUICE_MIN_MEMORY. Of a job with a minimum each process joins the pool.
  std::string min_memory{};
  std::string park{};  ///< "if_needed", "never" or empty: SLUICE_PARK
  std::chrono::seconds
      collective_timeout{};   ///< 0: as the environment says: SLUICE_COLLECTIVE_TIMEOUT_S
  bool require_pool = false;  ///< also for the processes of the command: SLUICE_REQUIRE_POOL
};

/// The pool that the command will find.
struct job_pool {
  std::string runtime_dir;
  std::string backend;  ///< "host" or "cuda"
};

/// `installed` as the environment of a command that shares that pool is to name it. Throws `unsupported` where a part that
/// it takes is missing.
[[nodiscard]] install_layout parts_for_sharing(install_layout const& installed,
                                               run_options const& options, job_pool const& pool);

/// Throws `invalid_argument` where torch's settings make a command take a GPU's memory past the pool.
void refuse_memory_outside(environment const& env, job_pool const& pool);

/// `inherited` with the variables of docs/operations.md for a command that shares.
[[nodiscard]] environment sharing_environment(environment inherited,
                                              install_layout const& installed,
                                              run_options const& options, job_pool const& pool);

/// `inherited` for vLLM, whose plugin then has its KV cache in that pool, whether or not its other memory is there. Throws
/// `unsupported` where the runtime library is missing.
[[nodiscard]] environment cache_environment(environment inherited, install_layout const& installed,
                                            run_options const& options, job_pool const& pool);

/// `inherited` for a command that runs without the pool: `import sluice` works, and shares nothing.
[[nodiscard]] environment plain_environment(environment inherited, install_layout const& installed);

/// `inherited` for a program that computes for a server, whose use of a GPU the gate tells: the gate is preloaded, unless
/// the backend is "host". Throws what `preloadable` throws.
[[nodiscard]] environment serving_environment(environment inherited,
                                              install_layout const& installed,
                                              std::string const& runtime_dir,
                                              std::string const& backend);

/// Options completed from the environment. Throws `invalid_argument` for a variable with a value it
/// cannot have.
[[nodiscard]] run_options complete(run_options options, environment const& inherited);

/// Runs the command; returns the exit code for the whole program, which is 125 for a failure of the
/// launcher's own. Messages go to the log. Call before any thread exists.
[[nodiscard]] int run(run_options const& options, std::vector<std::string> const& command,
                      install_layout const& installed);

}  // namespace sluice::launcher
