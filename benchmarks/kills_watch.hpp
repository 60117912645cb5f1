/// How the benchmark `kills` sees what happens: the pool's ledger through the broker's descriptors,
/// and processes through pidfds. It is no client of the pool and disturbs nobody.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::bench {

/// The ledger of a running pool, for reading.
class ledger_watch {
 public:
  /// Throws `not_found` if that process has no ledger open.
  explicit ledger_watch(pid_t broker);

  [[nodiscard]] memhandover::ledger_view const& view() const noexcept { return *view_; }
  /// The slot of a client that is that process or a child of it; nothing while there is none.
  [[nodiscard]] std::optional<std::uint32_t> slot_of(pid_t process) const;
  /// Chunks that stand as those of `slot`.
  [[nodiscard]] std::uint32_t held_by(std::uint32_t slot) const;
  /// Chunks that stand as those of a slot without a client, and still do some time later.
  [[nodiscard]] std::uint32_t leaked() const;

 private:
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> strays() const;

  memhandover::unique_fd ledger_;
  memhandover::unique_fd mailroom_;
  std::optional<memhandover::ledger_view> view_;
};

/// Starts a program. It dies with this process.
[[nodiscard]] pid_t start(std::vector<std::string> const& command);

/// A process and all of its session that descend from it now, as pidfds; the first is its own.
[[nodiscard]] std::vector<memhandover::unique_fd> family_of(pid_t process);

/// Waits until all these processes have ended. False at the deadline.
[[nodiscard]] bool await_ends(std::span<memhandover::unique_fd const> processes,
                              std::chrono::steady_clock::time_point deadline);

/// Parent of a process, 0 if there is none.
[[nodiscard]] pid_t parent_of(pid_t process);

}  // namespace sluice::bench
