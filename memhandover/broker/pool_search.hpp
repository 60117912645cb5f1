/// The pools of this machine, whoever keeps them: found by the ledgers that processes hold open.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memhandover/device/device_memory.hpp"

namespace sluice::memhandover {

/// A process that keeps a pool's memory alive.
struct pool_holder {
  int pid = 0;
  std::uint64_t start_ticks = 0;  ///< start time, which tells a reused pid apart
  std::string command;            ///< name of its program, at most 15 bytes
  /// `client`: named in the ledger; `broker`: a `sluice broker`; `other`: neither, such as a forked
  /// descendant.
  enum class role { broker, client, other } is = role::other;
};

struct found_pool {
  std::uint64_t id = 0;
  pool_shape shape;
  std::string problem;      ///< why the ledger cannot be read; empty if it can
  std::string runtime_dir;  ///< of the broker; empty without one
  std::vector<pool_holder> holders;

  /// Only strays are left: nobody who would use the pool, or give its memory back.
  [[nodiscard]] bool orphaned() const noexcept;
};

/// All pools that processes of this user hold; those of others cannot be seen (root sees all).
[[nodiscard]] std::vector<found_pool> find_pools();

/// Kills every holder of an orphaned pool, which frees its memory; returns how many there were. A
/// process that is no longer the one that was found is left alone. Does nothing to other pools.
int end_orphan(found_pool const& pool);

}  // namespace sluice::memhandover
