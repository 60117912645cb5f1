/// The processes that the benchmark `kills` ends: a training job and an inference server, both with
/// the real library.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace sluice::bench {

/// What the server tells the benchmark, in memory that both map.
struct server_progress {
  std::atomic<std::uint64_t> joined, served, failed, wrong;
};

struct role_options {
  std::string runtime_dir;
  std::uint64_t bytes = 0;  ///< trainer: of a micro-batch; server: of the largest acquisition
  int workers = 0;          ///< trainer: forked processes that inherit the pool
  int progress_fd = -1;     ///< server: a file of at least a page, for `server_progress`
};

/// Trains until SIGTERM, then stops itself (SIGSTOP) with nothing under way, so that its holdings
/// can be compared with the ledger.
int trainer_role(role_options const& options);

/// Takes and gives back memory until SIGTERM.
int server_role(role_options const& options);

}  // namespace sluice::bench
