/// Processes of a job, by identity: a pid is the next process's when its own has died, and others' in containers
/// that share a runtime folder.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::nccl_shim {

struct rank_process {
  std::int32_t pid = 0;             ///< in its own namespace of pids
  std::uint64_t start_ticks = 0;    ///< in clock ticks since boot; 0: not known
  std::uint64_t pid_namespace = 0;  ///< the namespace's inode; 0: not known

  bool operator==(rank_process const&) const = default;
};

[[nodiscard]] rank_process this_process() noexcept;

/// A process that is looked at from time to time, whether it has died. Thread-safety: none.
class watched_process {
 public:
  watched_process() noexcept = default;
  watched_process(watched_process const&) = delete;
  watched_process& operator=(watched_process const&) = delete;
  watched_process(watched_process&& other) noexcept;
  watched_process& operator=(watched_process&& other) noexcept;
  ~watched_process();

  /// Whether it is known to have died; not of one in another namespace, whose pid says nothing here.
  [[nodiscard]] bool has_died(rank_process const& which) noexcept;

 private:
  int pidfd_ = -1;
};

/// Opens a file, closed on exec, by none of the descriptors of the standard streams, which a process may have closed
/// and still print to. −1 with `errno`.
[[nodiscard]] int open_file(std::string const& path, int flags) noexcept;

}  // namespace sluice::nccl_shim
