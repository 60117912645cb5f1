/// The ranks of one communicator that are under `sluice run`, and the cut that they share.
///
///   joined ──NCCL's communicator is there──► agreeing, if all ranks have joined by then
///                                       └──► alone: the rest is not under `sluice run`, or on hosts that
///                                            share no store; calls are made without asking
///
/// Each rank joins before it makes its communicator, and NCCL returns from that when all ranks have
/// come to it: so that all of them find the same. They meet in a file of the runtime folder, named by
/// what NCCL tells all ranks, which goes when all have it open. What ranks leave that die before,
/// the next to join removes. In a job on several hosts they meet in its store as well, and agree through
/// that where not all are in the file.
/// Ranks on the host, which gloo connects, meet by a key that they send each other
/// (runtime/step/rank_agreement.hpp).
///
/// Thread-safety: as `cut`; `complete` once, before the rest.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nccl_shim/agreement/cut.hpp"
#include "nccl_shim/agreement/cut_memory.hpp"
#include "nccl_shim/agreement/exchanges.hpp"
#include "nccl_shim/agreement/heartbeat.hpp"
#include "nccl_shim/agreement/processes.hpp"
#include "nccl_shim/agreement/store_meeting.hpp"

namespace sluice::nccl_shim {

/// What lies in the file, zero at first.
struct meeting {
  struct member {
    std::atomic<std::int32_t> pid;  ///< the last to be written
    std::atomic<std::uint64_t> start_ticks;
    std::atomic<std::uint64_t> pid_namespace;
    std::atomic<std::uint32_t> left;  ///< 1: it has done with the communicator, and may end
    std::atomic<std::uint32_t> rank;
    std::atomic<std::uint32_t> place;  ///< 1 + its place on the board; 0: none
  };
  std::atomic<std::uint32_t> joined;
  std::array<member, max_ranks> members;  ///< in the order in which they have joined
  cut_memory agreed;
  exchange_memory exchanged;
};

class rank_group {
 public:
  /// `across` is the store of a job on several hosts, `place` this process's on the board, if it has one. Nothing if
  /// the folder or the file cannot be used; the reason has been printed.
  [[nodiscard]] static std::unique_ptr<rank_group> join(
      std::string const& folder, std::string const& key, store* across = nullptr,
      std::optional<unsigned> place = std::nullopt);
  rank_group(rank_group const&) = delete;
  rank_group& operator=(rank_group const&) = delete;
  ~rank_group();

  /// The communicator is there. Whether its ranks agree; not where some have not joined.
  [[nodiscard]] bool complete(unsigned rank, unsigned ranks);
  /// How many have joined on this host.
  [[nodiscard]] unsigned joined() const noexcept;
  /// Why its ranks do not agree, of whom there are so many.
  [[nodiscard]] std::string why_alone(unsigned ranks) const;
  [[nodiscard]] std::string const& key() const noexcept { return key_; }
  [[nodiscard]] cut& agreement() noexcept { return *cut_; }
  [[nodiscard]] exchanges& transfers() noexcept { return *exchanges_; }
  /// Whether ranks can wait for each other's sends and receives: each is a process of this host, with a place of its own.
  [[nodiscard]] bool all_have_places() const noexcept { return all_have_places_; }
  /// Whether all of its processes on this host are among another's.
  [[nodiscard]] bool is_part_of(rank_group const& whole) const noexcept;
  /// Whether this rank needs the others to agree.
  void need(bool needs) noexcept;
  /// After that: waits until it has launched what others had launched before, collectives, sends and receives.
  /// Granted, lost, differs or late. Where nobody has waited for that, others' devices may have to.
  [[nodiscard]] outcome resolve(std::int64_t deadline_ns) noexcept;
  /// Whether others' devices wait for what this rank has not launched yet.
  [[nodiscard]] bool lags() const noexcept { return cut_->lags() || exchanges_->lags(); }
  /// Who is lost; empty if nobody.
  [[nodiscard]] std::string loss() const;
  /// Tells the others of ranks that have died on this host.
  void look_for_deaths() noexcept;
  /// How many communicators have been split off.
  [[nodiscard]] unsigned next_child() noexcept { return ++children_; }

 private:
  rank_group(std::string path, std::string key, int file, meeting* at) noexcept;
  [[nodiscard]] std::span<meeting::member const> members() const noexcept;
  /// Whether a member is known to have died: one in another namespace of pids by its byte of the file, which it has
  /// taken as long as it lives.
  [[nodiscard]] bool has_died(unsigned place) noexcept;
  [[nodiscard]] std::unique_ptr<cut_words> words_for(unsigned rank, unsigned ranks);

  std::string path_;
  std::string key_;
  int file_;
  meeting* at_;
  std::unique_ptr<store_meeting> across_;  // until it is known that all are on this host
  std::unique_ptr<cut_words> words_;
  std::optional<cut> cut_;
  std::optional<exchanges> exchanges_;
  std::unique_ptr<heartbeat> beat_;      // where the words are in the store
  std::mutex looking_;                   // guards the next one once the communicator is there
  std::vector<watched_process> others_;  // each member
  unsigned place_ = 0;                   // among the members
  bool all_have_places_ = false;
  std::atomic<bool> exchanges_resolved_{true};
  unsigned children_ = 0;
};

}  // namespace sluice::nccl_shim
