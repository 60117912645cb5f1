/// Where the ranks of a job stop, so that none of them has launched a collective that another never
/// will. Modelled in tests/model/cut.pml; docs/collectives.md says what it is for.
///
/// Collectives, and commits of micro-batches that have some inside, are numbered alike on all ranks:
///
///   arrive ──► await ──granted──► launch ──► launched ──► arrive at the next …
///                 └────dropped──► back to the last commit, in the new epoch
///
/// A rank arrives at a number when all before it is with its device. The number is granted when all
/// ranks have arrived, and what is granted must be launched. Epoch, pauses and grants are one word:
///
///   {epoch, pausing, granted}  ──all have arrived, nobody pauses──►  {epoch, pausing, granted + 1}
///                              ──pause──►  {epoch or the next, pausing + 1, granted}  ──resume──►
///
/// A pause ends the grants, for all ranks: the cut is where they stand. The rank that pauses owes what
/// has been granted; the others go on until a grant is missing. If its micro-batch is to run again, the
/// pause begins an epoch: what has not been granted is dropped on all ranks.
///
/// While no rank needs that, nobody waits: what a rank has arrived at is as good as granted. The first
/// that needs it says so in the word, and then grants up to where the farthest has arrived.
///
/// Thread-safety: of one rank's, `arrive`, `await`, `launched`, `follow` and `resume_without` from one
/// thread, `pause`, `await_debts` and `resume` from another, `need` from one at a time, `settle` from one;
/// the rest from any.
/// Nothing throws or blocks but the waits.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice::nccl_shim {

inline constexpr unsigned max_ranks = 64;

/// The word.
struct cut_word {
  std::uint16_t epoch = 0;  ///< of 9 bits: it is only asked whether it is another one
  bool catching_up =
      false;  ///< the first that needs it has not granted what others have launched yet
  std::uint8_t needed = 0;    ///< ranks that need it
  std::uint8_t pausing = 0;   ///< ranks that pause
  std::uint64_t granted = 0;  ///< less than 2⁴⁰: a million collectives a second for twelve days

  static constexpr std::uint64_t one_pausing = std::uint64_t{1} << 40U;

  constexpr void next_epoch() noexcept {
    epoch = static_cast<std::uint16_t>((epoch + 1U) & 0x1ffU);
  }
  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return std::uint64_t{epoch} << 55U | std::uint64_t{catching_up} << 54U |
           std::uint64_t{needed} << 47U | std::uint64_t{pausing} << 40U | granted;
  }
  [[nodiscard]] static constexpr cut_word unpack(std::uint64_t word) noexcept {
    return {static_cast<std::uint16_t>(word >> 55U), (word >> 54U & 1U) != 0,
            static_cast<std::uint8_t>(word >> 47U & 0x7fU),
            static_cast<std::uint8_t>(word >> 40U & 0x7fU), word & (one_pausing - 1)};
  }
  bool operator==(cut_word const&) const = default;
};

/// What a number stands for; all ranks must mean the same.
struct numbered_call {
  std::uint64_t operation = 0;  ///< which function, and of a group how many calls
  std::uint64_t type = 0;       ///< of the elements
  std::uint64_t count = 0;      ///< of the elements; of a group a hash of its calls
  std::uint64_t root = 0;       ///< or the reduction

  bool operator==(numbered_call const&) const = default;
};

inline constexpr std::uint64_t remembered_calls = 32;

/// In shared memory, zero at first. Each rank writes its own part.
struct cut_memory {
  struct alignas(64) rank_part {
    std::atomic<std::uint64_t> arrived{0};   ///< {epoch: 16, number: 48}
    std::atomic<std::uint64_t> launched{0};  ///< the last number
    /// The last calls, a number's at its remainder: ranks that nobody holds up may be apart.
    std::array<std::array<std::atomic<std::uint64_t>, 4>, remembered_calls> calls{};
  };
  alignas(64) std::atomic<std::uint64_t> word{0};
  alignas(64) std::atomic<std::uint32_t> turn{0};  ///< grows with what somebody may wait for
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint32_t> lost{0};    ///< 1 + a rank that has died
  std::atomic<std::uint64_t> differ{0};  ///< {1 + number: 48, rank: 8, rank: 8} whose calls differ
  std::array<rank_part, max_ranks> ranks;
};

enum class outcome {
  granted,  ///< launch it
  dropped,  ///< go back to the last commit
  differs,  ///< ranks mean different calls by it: `difference` tells
  lost,     ///< a rank has died
  late      ///< the deadline has passed; ask again
};

/// One rank's part in it.
class cut {
 public:
  cut(cut_memory& shared, unsigned rank, unsigned ranks) noexcept
      : shared_{shared}, rank_{rank}, ranks_{ranks} {}

  /// All before the next number is with the device.
  void arrive(numbered_call const& what) noexcept;
  /// Waits for what becomes of it. Deadlines are CLOCK_MONOTONIC nanoseconds.
  [[nodiscard]] outcome await(std::int64_t deadline_ns) noexcept;
  /// What was granted has been launched.
  void launched() noexcept;
  /// The ranks that have not arrived at this rank's number.
  [[nodiscard]] std::vector<unsigned> missing() const;
  /// The last number that this rank has arrived at.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

  /// Whether this rank needs that nobody launches what others may not. At first it does not.
  void need(bool needs) noexcept;
  /// After that: waits until this rank has launched what others, whom nobody held up, had launched before.
  /// Granted, lost, differs or late. Where nobody has waited for that, others' devices may have to.
  [[nodiscard]] outcome settle(std::int64_t deadline_ns) noexcept;

  /// Whether any rank does.
  [[nodiscard]] bool is_needed() const noexcept {
    return cut_word::unpack(shared_.word.load(std::memory_order_seq_cst)).needed != 0;
  }

  /// Whether others' devices wait for what this rank has not launched yet.
  [[nodiscard]] bool owes() const noexcept {
    return cut_word::unpack(shared_.word.load(std::memory_order_seq_cst)).granted >
           shared_.ranks[rank_].launched.load(std::memory_order_seq_cst);
  }

  /// Ends the grants; `again`: also what has not been granted in this epoch. Returns the cut.
  [[nodiscard]] std::uint64_t pause(bool again) noexcept;
  /// Waits until this rank has launched all up to there: granted, lost or late.
  [[nodiscard]] outcome await_debts(std::uint64_t up_to, std::int64_t deadline_ns) noexcept;
  void resume() noexcept;
  /// The same for a rank that has withdrawn from what it has arrived at and will not come back to it: in a
  /// new epoch, if this one has not ended yet.
  void resume_without() noexcept;
  /// What has not been granted is dropped on all ranks.
  void begin_epoch() noexcept;
  [[nodiscard]] std::uint16_t epoch() const noexcept {
    return cut_word::unpack(shared_.word.load(std::memory_order_seq_cst)).epoch;
  }
  /// What this rank arrives at next belongs to that epoch.
  void follow(std::uint16_t epoch) noexcept { epoch_ = epoch; }

  /// Ends everybody's waits.
  void declare_lost(unsigned rank) noexcept;
  [[nodiscard]] std::optional<unsigned> lost() const noexcept;

  struct difference_found {
    std::uint64_t number;
    std::array<unsigned, 2> ranks;
    std::array<numbered_call, 2> calls;
  };
  [[nodiscard]] std::optional<difference_found> difference() const noexcept;

 private:
  enum class sight { all_alike, somebody_missing, differ };
  struct glance {
    sight what;
    std::array<unsigned, 2> ranks;
  };
  [[nodiscard]] glance look(cut_word const& at) const noexcept;
  [[nodiscard]] numbered_call call_of(unsigned rank, std::uint64_t number) const noexcept;
  void compare_with(unsigned neighbour) noexcept;
  void declare_different(std::uint64_t number, unsigned one, unsigned other) noexcept;
  void catch_up() noexcept;
  void try_to_grant() noexcept;
  template <typename Change>
  cut_word change(Change how) noexcept;
  void tell() noexcept;
  template <typename Ask>
  [[nodiscard]] outcome wait(std::int64_t deadline_ns, Ask ask) noexcept;
  [[nodiscard]] std::optional<outcome> trouble() const noexcept;

  cut_memory& shared_;
  unsigned rank_;
  unsigned ranks_;
  bool needs_ = false;
  std::atomic<bool> settled_{true};
  std::uint64_t number_ = 0;
  std::uint16_t epoch_ = 0;
};

}  // namespace sluice::nccl_shim
