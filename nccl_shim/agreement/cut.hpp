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
/// A pause ends the grants, for all ranks: the cut is where they stand. The rank that pauses still
/// launches what has been granted; the others go on until a grant is missing. If its micro-batch is to
/// run again, the pause begins an epoch: what has not been granted is dropped on all ranks.
///
/// While no rank needs that, nobody waits: what a rank has arrived at is as good as granted. The first
/// that needs it says so in the word, and then grants up to where the farthest has arrived. Meanwhile nobody
/// who needs it says where it arrives: that waits, and granted it would be a debt of the others'.
///
/// Thread-safety: of one rank's, `arrive`, `pass`, `await`, `launched`, `follow` and `resume_without` from one
/// thread, `pause`, `await_debts` and `resume` from another, `need` from one at a time, `resolve` from one;
/// the rest from any.
/// Nothing throws or blocks but the waits, as far as the words do not: those of several hosts are asked for
/// over the network.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "nccl_shim/agreement/cut_words.hpp"

namespace sluice::nccl_shim {

enum class outcome {
  granted,  ///< launch it
  dropped,  ///< go back to the last commit
  differs,  ///< ranks mean different calls by it: `difference` tells
  lost,     ///< a rank has died
  late      ///< the deadline has passed; ask again
};

/// What has become of a number that a rank would rather not wait for.
enum class passing {
  refused,  ///< somebody needs to be asked: nothing has been done
  passed,   ///< it has been arrived at, and granted
  unclear  ///< it has been arrived at, and somebody needs to be asked by now, or another call may be meant
};

/// One rank's part in it. What a call needs of it lies in one line of the cache.
class alignas(64) cut {
 public:
  /// `words` are this rank's way to what all share.
  cut(cut_words& words, unsigned rank, unsigned ranks) noexcept
      : memory_{words.memory()}, rank_{rank}, ranks_{ranks}, words_{words} {}

  /// All before the next number is with the device.
  void arrive(numbered_call const& what) noexcept;
  /// Arrives in the epoch that there is, if nobody needs to be asked. Over a network it is always refused.
  [[nodiscard]] passing pass(numbered_call const& what) noexcept;
  /// What `pass` will look at is fetched meanwhile.
  void prepare_to_pass() const noexcept;
  /// Waits for what becomes of it. Deadlines are CLOCK_MONOTONIC nanoseconds.
  [[nodiscard]] outcome await(std::int64_t deadline_ns) noexcept;
  /// Whether it is granted already.
  [[nodiscard]] bool is_granted() const noexcept {
    return cut_word::unpack(words_.look().word).granted >= number_;
  }
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
  [[nodiscard]] outcome resolve(std::int64_t deadline_ns) noexcept;

  /// Whether any rank does.
  [[nodiscard]] bool is_needed() const noexcept {
    return cut_word::unpack(words_.look().word).needed != 0;
  }

  /// Whether others' devices wait for what this rank has not launched yet.
  [[nodiscard]] bool lags() const noexcept {
    return cut_word::unpack(words_.look().word).granted > words_.launched();
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
  /// The same, if that epoch has not ended yet.
  void end_epoch(std::uint16_t which) noexcept;
  [[nodiscard]] std::uint16_t epoch() const noexcept {
    return cut_word::unpack(words_.look().word).epoch;
  }
  /// What this rank arrives at next belongs to that epoch.
  void follow(std::uint16_t epoch) noexcept { epoch_ = epoch; }

  /// Where epochs are those of another cut, the leading one, whose ranks are more: this one's becomes the present one.
  void catch_up_with(cut const& leading) noexcept;
  /// As without it, when the leading one's epoch in which this rank arrived has ended.
  void resume_without(cut const& leading) noexcept;

  /// Ends everybody's waits.
  void declare_lost(unsigned rank) noexcept;
  /// A rank that is lost, or `the_words` if they are.
  [[nodiscard]] std::optional<unsigned> lost() const noexcept;
  /// How long to leave it alone before `await` is called anew, by who has waited so long.
  [[nodiscard]] std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept {
    return words_.between_looks(waited);
  }

  struct difference_found {
    std::uint64_t number;
    std::array<unsigned, 2> ranks;
    std::array<numbered_call, 2> calls;
  };
  [[nodiscard]] std::optional<difference_found> difference() const noexcept;

 private:
  void say(numbered_call const& what) noexcept;
  void take_back() noexcept {
    --number_;
    unsaid_ = false;
  }
  void has_arrived() noexcept;
  void compare_with(unsigned neighbour) noexcept;
  void declare_different(std::uint64_t number, unsigned one, unsigned other) noexcept;
  void grant_what_was_launched() noexcept;
  void try_to_grant() noexcept;
  template <typename Change>
  cut_word change(Change how) noexcept;
  template <typename Ask>
  [[nodiscard]] outcome wait(std::int64_t deadline_ns, Ask ask) noexcept;

  [[nodiscard]] unsigned next_rank() const noexcept { return (rank_ + 1) % ranks_; }
  [[nodiscard]] unsigned last_rank() const noexcept { return (rank_ + ranks_ - 1) % ranks_; }

  cut_memory* memory_;
  std::uint64_t number_ = 0;
  unsigned rank_;
  unsigned ranks_;
  std::uint16_t epoch_ = 0;
  bool needs_ = false;
  std::atomic<bool> resolved_{true};
  std::atomic<bool> may_catch_up_{false};  // somebody, for all that is known here
  bool unsaid_ = false;                    // that it has arrived at its number …
  cut_words& words_;
  numbered_call to_say_;  // … with that
};

}  // namespace sluice::nccl_shim
