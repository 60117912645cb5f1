/// What the ranks of a communicator have sent to and received from each other: which of them a rank's next
/// sends and receives wait for. Of a group's collectives each counts as both, with all other ranks.
///
/// The n-th send from one rank to another is what the n-th receive there takes. A rank *lacks* another one when
/// that has not made its part of what the first is about to make.
///
/// Thread-safety: `begin_passing` to `made` from one thread at a time; the rest from any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "nccl_shim/agreement/cut.hpp"

namespace sluice::nccl_shim {

/// With one rank.
struct transfers {
  unsigned peer;
  std::uint32_t sends;
  std::uint32_t receives;
};

/// Adds to what there is with that rank; each rank is in it once, in their order.
void add(std::vector<transfers>& all, transfers const& more);

/// In shared memory, zero at first. Each rank writes its own part.
struct exchange_memory {
  struct alignas(64) rank_part {
    /// 1 + its place on the board; 0: it has none, or is not there yet.
    std::atomic<std::uint32_t> place;
    std::atomic<std::uint32_t> passing;  ///< how many it makes without asking just now
    std::array<std::atomic<std::uint64_t>, max_ranks> made;  ///< by peer: {sends: 32, receives: 32}
  };
  std::array<rank_part, max_ranks> ranks;
};

/// Ranks whose part is missing.
struct lacking {
  std::vector<unsigned> ranks;
  std::uint32_t places = 0;  ///< theirs on the board …
  bool all_have_one = true;  ///< … if each is there already

  /// 0 if one of them is still on its way.
  [[nodiscard]] std::uint32_t known_places() const noexcept { return all_have_one ? places : 0; }
};

/// One rank's part in it.
/// What is given to it has no rank twice.
class exchanges {
 public:
  exchanges(exchange_memory& shared, unsigned rank, unsigned ranks) noexcept
      : shared_{shared}, rank_{rank}, ranks_{ranks} {}

  /// 1 + this rank's place on the board; 0: it has none.
  void take_place(std::uint32_t place) noexcept;
  [[nodiscard]] lacking lacks(std::span<transfers const> all) const;
  [[nodiscard]] std::vector<unsigned> others() const;
  /// The places of some ranks.
  [[nodiscard]] lacking places_of(std::vector<unsigned> ranks) const;

  /// Says that this rank is about to make some without asking, before it looks whether it may.
  void begin_passing() noexcept;
  void end_passing() noexcept;
  /// They have been made.
  void made(std::span<transfers const> all) noexcept;
  /// Whether other ranks have made what this one has not.
  [[nodiscard]] bool lags() const noexcept;
  /// Whether other ranks are about to make some without asking.
  [[nodiscard]] bool others_are_passing() const noexcept;

 private:
  [[nodiscard]] std::uint64_t made_by(unsigned rank, unsigned peer) const noexcept {
    return shared_.ranks[rank].made[peer].load(std::memory_order_seq_cst);
  }

  exchange_memory& shared_;
  unsigned rank_;
  unsigned ranks_;
};

}  // namespace sluice::nccl_shim
