/// The communicators of this process: which there are, and what is known of each.
///
///   made ──enlist──► known ──give_up──► given up ──bury──► not to be called, until another has its address
///                      └─────────────────forget──► unknown
///
/// Thread-safety: everything may be called from any thread, as far as NCCL allows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi/nccl_abi.hpp"
#include "nccl_shim/agreement/rank_group.hpp"
#include "nccl_shim/calls/known_communicator.hpp"

namespace sluice::nccl_shim {

/// To be called before a communicator is made: `key` is what all its ranks know, and no others.
[[nodiscard]] std::unique_ptr<rank_group> join(std::string const& key);
/// And after: from now on its calls are agreed on if all its ranks have joined.
void enlist(communicator made, std::unique_ptr<rank_group> of);
/// What tells a communicator from all others, which its ranks know.
[[nodiscard]] std::string key_of(unique_id const& id);
/// The key of what is split off; nothing if the parent's ranks do not agree.
[[nodiscard]] std::optional<std::string> key_of_child(communicator parent, int colour);

/// nullptr: none is known at that address.
[[nodiscard]] std::shared_ptr<known_communicator> find(communicator which);
/// The same; one that is not known yet is from now on.
[[nodiscard]] std::shared_ptr<known_communicator> know(communicator which);
/// The communicators whose ranks agree, but for those that are given up: nothing of them will be made any more.
[[nodiscard]] std::vector<std::shared_ptr<known_communicator>> agreeing();
/// Whether this process has one whose ranks do not agree, so that their devices may wait for it whenever it stands still.
[[nodiscard]] bool others_may_wait();
/// Whether other ranks' devices wait for a call of this process, of any communicator, that it has not made yet.
[[nodiscard]] bool lags_behind_others();

/// Why the ranks of all communicators must be asked: this process may pause, or works together with others in micro-batches.
/// They are told.
void may_pause(bool may);
void works_together(bool together);

/// The error that the calls of a communicator have left; `success` if none.
[[nodiscard]] int error_of(communicator which) noexcept;
/// Ends the waits for it, for good: NCCL is not called about it any more. Returns when it is not, or after a second:
/// what NCCL is in the middle of then may be ended by its abort alone.
void give_up(communicator which) noexcept;
/// It has been given up and is about to go: of it is only known that it may not be called, until there is another one
/// at its address.
void bury(communicator which) noexcept;
/// It is about to go.
void forget(communicator which) noexcept;

/// Until it ends nothing of what `find_again` finds goes.
class submission_under_way {
 public:
  submission_under_way() noexcept { submitting.fetch_add(1, std::memory_order_seq_cst); }
  submission_under_way(submission_under_way const&) = delete;
  submission_under_way& operator=(submission_under_way const&) = delete;
  submission_under_way(submission_under_way&& other) noexcept
      : lasts_{std::exchange(other.lasts_, false)} {}
  submission_under_way& operator=(submission_under_way&&) = delete;
  ~submission_under_way() { end(); }
  void end() noexcept {
    if (std::exchange(lasts_, false)) {
      submitting.fetch_sub(1, std::memory_order_release);
    }
  }
  /// Whether none is.
  [[nodiscard]] static bool is_over() noexcept {
    return submitting.load(std::memory_order_seq_cst) == 0;
  }

 private:
  static std::atomic<unsigned> submitting;  // threads that look at what they have found last
  bool lasts_ = true;
};

/// What a thread has called last, as long as the registry does not change. To be looked at while a submission is under
/// way.
struct last_called {
  communicator which;
  known_communicator* known;
  cut* agreement;  // nullptr: its ranks do not agree
  std::uint64_t version;
};

[[nodiscard]] last_called const& find_again(communicator which);

}  // namespace sluice::nccl_shim
