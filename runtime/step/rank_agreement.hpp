/// What a training process on the host asks the other ranks of its job before a collective of a micro-batch, and
/// before the end of one: all keep a micro-batch, or all run it again (nccl_shim/agreement/cut.hpp).
///
///   ─ask─► asked ──granted──► passing ──made──►
///            │ ▲ └─dropped──► the micro-batch runs again
///            └─┘ held by a compute pause: the question is taken back meanwhile
///
/// Whoever asks is in no operator, so that its memory can be taken while it waits. The control thread pauses the
/// cut before it takes any: what has been granted by then is made first, in an operator that a closed gate lets
/// pass, since the other ranks make it as well. A micro-batch belongs to the epoch in which it asks first, and a rank
/// whose memory goes begins another: what others ask for in the old one is dropped.
///
/// Ranks may also work together in groups of some of them. Each group numbers its collectives for itself; micro-batches end with
/// numbers of the group of all, whose epoch the others' follow (nccl_shim/calls/domain.hpp, tests/model/domain.pml).
///
/// Thread-safety: `join`, `complete` and questions from the thread that trains, of which one is open at a time; `pause`,
/// `await_debts` and `resume` from the control thread; `run_again` from either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nccl_shim/agreement/cut.hpp"
#include "nccl_shim/agreement/rank_group.hpp"

namespace sluice::step {

class rank_agreement {
 public:
  /// A rank's place in a group.
  struct place {
    unsigned rank;
    unsigned ranks;
  };

  /// Meets the other ranks of each group in the folder, by a key that they know and nobody else. The first group has all
  /// ranks. Nothing if the folder cannot be used; the reason has been printed.
  [[nodiscard]] static std::unique_ptr<rank_agreement> join(std::string const& folder,
                                                            std::span<std::string const> keys);
  /// All have joined that ever will. False if those are not all, in some group.
  [[nodiscard]] bool complete(std::span<place const> in_each);
  [[nodiscard]] std::size_t groups() const noexcept { return groups_.size(); }

  // --- questions; of which group one is, those that have no argument for it know from `ask`
  /// The next question is of that micro-batch, counted from 1; 0: of none. Before it is looked whether its memory is
  /// there: whoever has lost it has begun an epoch since, which the micro-batch must not be taken for a part of.
  void follow(std::uint64_t micro_batch) noexcept;
  void ask(nccl_shim::numbered_call const& what, std::size_t of = 0) noexcept;
  [[nodiscard]] bool is_open() const noexcept { return open_; }
  /// Whether a compute pause holds this thread: then nothing is granted meanwhile, unless it has been already.
  void hold(bool held) noexcept;
  /// What has become of it by the deadline (CLOCK_MONOTONIC). `late`: it is still open. Also looks for ranks that have
  /// died.
  [[nodiscard]] nccl_shim::outcome await(std::int64_t deadline_ns) noexcept;
  /// Takes an open question back for good. True if it has been granted: then it must be made.
  [[nodiscard]] bool withdraw() noexcept;
  /// What was granted has been made.
  void made() noexcept;

  [[nodiscard]] std::uint64_t number() const noexcept { return agreed().number(); }
  /// The ranks of its group that have not come to the open question.
  [[nodiscard]] std::vector<unsigned> missing() const { return agreed().missing(); }
  /// Who of all is lost, in words; empty if nobody.
  [[nodiscard]] std::string loss() const;
  [[nodiscard]] std::optional<nccl_shim::cut::difference_found> difference() const noexcept {
    return agreed().difference();
  }

  // --- pauses
  void pause() noexcept;
  /// Waits until what was granted before has been made. False if that is not so by the deadline.
  [[nodiscard]] bool await_debts(std::int64_t deadline_ns) noexcept;
  void resume() noexcept;
  /// This rank's micro-batch runs again, and so must the others'.
  void run_again() noexcept;

 private:
  struct group {
    std::unique_ptr<nccl_shim::rank_group> ranks;
    std::uint64_t cut = 0;  ///< of the control thread's pause
  };

  explicit rank_agreement(std::vector<group> groups) noexcept;
  [[nodiscard]] nccl_shim::cut& all() const noexcept { return groups_.front().ranks->agreement(); }
  /// Of the question.
  [[nodiscard]] nccl_shim::cut& agreed() const noexcept {
    return groups_[group_].ranks->agreement();
  }
  [[nodiscard]] bool is_of_all() const noexcept { return group_ == 0; }
  [[nodiscard]] nccl_shim::outcome look(std::int64_t deadline_ns) noexcept;

  std::vector<group> groups_;
  std::size_t group_ = 0;          ///< of the last question
  std::uint64_t micro_batch_ = 0;  ///< that asked last
  std::uint16_t epoch_ = 0;        ///< that it belongs to
  bool inside_ = false;            ///< whether the question is part of it
  bool open_ = false;
  bool held_ = false;
  std::int64_t look_at_ = 0;  ///< when it is looked for deaths again
};

}  // namespace sluice::step
