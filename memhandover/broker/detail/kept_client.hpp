/// A client as the broker knows it: its process, its connection, and the pipe that ends with the last
/// process that can reach its memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "memhandover/base/processes.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/detail/copy_keeper.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::detail {

struct kept_client {
  bool present = false;
  bool reported = false;  ///< the server has been asked to take back what it held
  bool ready = false;     ///< a server that has said so: it can write the ledger
  /// Of an earlier broker, in a namespace where this one sees no process: it lives until its lock has
  /// gone.
  bool unseen = false;
  process_identity who;
  unique_fd socket;
  unique_fd process;  ///< pidfd
  /// Read end of its life pipe; empty if it died before telling an adopting broker.
  unique_fd life;
  unique_fd bell;
  std::chrono::steady_clock::time_point look_at{};  ///< when its descendants are looked for again
  std::chrono::milliseconds look_every{5};

  /// Its process is gone, what it held is not taken back yet.
  [[nodiscard]] bool orphaned() const noexcept {
    return present && !process && !unseen && !reported;
  }
  /// As far as is known.
  [[nodiscard]] bool lives() const noexcept { return present && (process || unseen); }
  /// Its life pipe is known to have no holder left, which is much cheaper to see than to look
  /// through all processes for one.
  [[nodiscard]] bool alone() const;
  /// Ends the descendants that hold its life pipe; returns how many were found. It takes
  /// milliseconds, and the pipe tells of the last one's exit: so the next look is due later and
  /// later.
  int end_descendants(std::uint64_t pipe_inode);
  /// Of an orphaned client: no process can reach its memory any more. Descendants are ended when it
  /// is time to look for them again.
  [[nodiscard]] bool all_have_ended(std::uint64_t pipe_inode);
};

/// The process at the other end of a socket, as it says itself in `request`: with a pidfd of its own, so that it can
/// be watched from another namespace of pids, or else as this process sees it.
struct peer {
  process_identity who;
  unique_fd process;
};
/// Throws `unavailable` if it has ended, or can be neither seen nor watched; `invalid_argument` for what is no pidfd,
/// or another process's name.
[[nodiscard]] peer peer_at(unique_fd const& socket, nlohmann::json const& request, unique_fd pidfd);

/// A client that has come, with the life pipe that it has sent; not present yet. Throws `unavailable` if there can be
/// no bell for it.
[[nodiscard]] kept_client newcomer(peer from, unique_fd life);

/// The same bell for the ledger's writer. Throws `unavailable`.
[[nodiscard]] unique_fd bell_for_writer(unique_fd const& bell);

/// Sends a new client everything by which it reaches the pool, and the host copies if there are; `ledger`
/// and `published` are its own descriptors of ledger and manifest. Throws `unavailable` if it has gone.
void welcome(kept_client const& who, std::uint32_t slot, pool_files const& files,
             unique_fd const& ledger, unique_fd const& published,
             std::optional<copy_share> const& copies);

}  // namespace sluice::memhandover::detail
