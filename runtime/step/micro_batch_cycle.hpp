/// The states of a micro-batch, and who is stopped or hears of it when they change.
///
///   idle ──begin──► running ──commit_begin──► committing ──commit_end──► idle
///                      └───────── discard ──► idle
///
/// Beside that, whether its memory is there:
///
///   sound ──revoke, drop──► revoked      ──discard, begin──► sound
///         ──starve────────► starved      it has to be discarded, and no commit of it begins
///
/// If launches are deferred, so is a commit: the phase changes when the gate's submitter gets there, and until then the
/// micro-batch is running. Whether it counts is known from then on; the next micro-batch begins when the commit has been
/// made.
///
/// Micro-batches that work together with those of other processes all are kept, or all run again: the others hear once
/// that one of them does.
///
///   cycle.await_last();
///   {
///     std::lock_guard const lock{mutex};
///     cycle.begin();
///   }
///   if (cycle.commit_begin(false) == commit_start::begun) {
///     cycle.commit_end(false);   // `committed` is called
///   }
///
/// It knows the gate, and nothing of the memory: what a commit or a discard does to that is the owner's business.
///
/// Thread-safety: as the parts say. Those that need the lock never release it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "runtime/step/launch_gate.hpp"

namespace sluice::step {

enum class arena_state { sound, revoked, starved };

enum class commit_start {
  taken_away,  ///< discard the micro-batch
  begun,       ///< it counts
  deferred     ///< `commit_resolve` will tell
};

class micro_batch_cycle {
 public:
  using lock_type = std::unique_lock<std::mutex>;

  /// `mutex`: the owner's, "the lock". `gate`: of the device, null on the host. `computing`: who can be stopped from
  /// computing, the same or the operators of the host. `committed` is called with the lock when a commit has been made,
  /// with whether something made in the micro-batch lives on; it does not throw. All must outlive this object.
  micro_batch_cycle(std::mutex& mutex, launch_gate* gate, launch_gate& computing,
                    std::function<void(bool outlived)> committed);

  // --- from the training thread, without the lock; see training_memory.hpp
  /// Waits until the last commit has been made, which may have been left without a word.
  void await_last();
  [[nodiscard]] commit_start commit_begin(bool may_defer);
  void commit_end(bool outlived);
  [[nodiscard]] std::optional<bool> commit_resolve(std::int64_t deadline_ns);
  [[nodiscard]] bool await_commit(std::int64_t deadline_ns);
  void work_together(bool together);
  [[nodiscard]] bool end_with(void* communicator);
  void drop(std::function<bool()> const& is_running);

  // --- from any thread, without the lock
  [[nodiscard]] arena_state state() const noexcept {
    return state_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint64_t micro_batch() const noexcept { return micro_batch_.load(); }
  [[nodiscard]] std::int64_t reopened_ns() const noexcept { return reopened_ns_.load(); }
  /// True in the thread that commits, between commit_begin and commit_end.
  [[nodiscard]] static bool committing() noexcept;
  /// Wakes who is in `wait_for`.
  void notify() noexcept { changed_.notify_all(); }

  // --- with the lock
  [[nodiscard]] bool is_idle() const noexcept { return phase_ == phase::idle; }
  [[nodiscard]] bool is_running() const noexcept { return phase_ == phase::running; }
  [[nodiscard]] bool is_committing() const noexcept { return phase_ == phase::committing; }
  void begin() noexcept;
  /// From the training thread. What is launched meanwhile is dropped still.
  void discard_begin();
  /// `has_arena`: there is one again. For how long the micro-batch ran until its memory went, if that did.
  [[nodiscard]] std::optional<std::chrono::nanoseconds> discard_end(bool has_arena) noexcept;
  /// Nothing will be begun any more.
  void end() noexcept { phase_ = phase::idle; }

  /// The arena's memory went at that instant. True: a micro-batch was running in it.
  bool revoke(std::int64_t at_ns) noexcept;
  /// The arena has too little memory for what runs in it.
  void starve();
  /// On CUDA: until `end_abort` what the micro-batch launches is dropped.
  void abort();
  void end_abort();
  /// The micro-batch that is running will run again: the others hear of it, if they have not.
  void run_again();
  /// Launches are let through again after memory of a micro-batch has gone.
  void note_reopened() noexcept;

  /// Threads that wait for the pool, and that a commit may wait for.
  [[nodiscard]] bool is_held_up() const noexcept { return holding_up_ > 0; }
  void hold_up() noexcept { ++holding_up_; }
  void end_hold_up() noexcept { --holding_up_; }
  /// Waits until `over` holds, which is asked when the phase has changed or somebody has called `notify`; at most so long.
  template <typename Over>
  bool wait_for(lock_type& lock, std::chrono::milliseconds most, Over const& over) {
    return changed_.wait_for(lock, most, over);
  }

 private:
  [[nodiscard]] bool reach_commit() noexcept;
  [[nodiscard]] bool keep_together();
  void finish_commit(bool outlived) noexcept;

  std::mutex& mutex_;
  launch_gate* gate_;
  launch_gate& computing_;
  std::function<void(bool outlived)> committed_;
  std::condition_variable changed_;
  bool deferred_ = false;              ///< the commit; of the thread that commits alone
  std::atomic<bool> together_{false};  ///< see `work_together`
  std::atomic<bool> outlives_{false};  ///< what was made in the deferred commit's micro-batch
  std::atomic<arena_state> state_{arena_state::sound};
  std::atomic<std::uint64_t> micro_batch_{0};
  std::atomic<std::int64_t> reopened_ns_{0};
  // Guarded by the lock.
  enum class phase { idle, running, committing } phase_ = phase::idle;
  bool others_know_ = true;              ///< that the micro-batch runs again
  std::int64_t begun_ns_ = 0;            ///< when the micro-batch began …
  std::optional<std::int64_t> lost_ns_;  ///< … and when its memory went
  std::uint32_t holding_up_ = 0;
};

}  // namespace sluice::step
