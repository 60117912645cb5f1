/// All pool memory of a training process: the step arena, persistent memory, and chunks in between.
///
/// The arena's life in one micro-batch, and what a demand does to it in each state:
///
///   idle ──begin──► running ──commit_begin──► committing ──commit_end──► idle
///                      └───────── discard ──► idle
///
/// A demand takes the whole arena: at once while idle; while running, and the micro-batch is
/// discarded; after commit_end while committing. It never waits for a commit that waits for the pool itself: then it
/// is given what nothing uses, and the server decides. If launches are deferred, so is a commit: the phase
/// changes when the submitter gets there, and until then the micro-batch is running. Whether it counts
/// is known from then on; the next micro-batch begins when the commit has been made.
///
/// An arena that has been revoked is *retired*: its addresses are not used again while an
/// allocation in it lives. One whose allocations outlive a commit is *promoted*: the chunks that hold
/// them stay mapped and are never a victim. So does persistent memory that was left *sparse* when the
/// job had been set up: what lasts stays in it until it is freed, and everything new lies elsewhere.
///
/// Victims of a demand, in this order: chunks without a mapping, idle chunks at the end of arena
/// and of persistent memory, then the arena as a whole.
///
/// Thread-safety: all functions from any thread. No lock is held while waiting for the pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/client/training_client.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "runtime/step/chunk_stock.hpp"
#include "runtime/step/launch_gate.hpp"
#include "runtime/step/operator_gate.hpp"

namespace sluice::step {

enum class arena_state { sound, revoked, starved };

enum class commit_start {
  taken_away,  ///< discard the micro-batch
  begun,       ///< it counts
  deferred     ///< `commit_resolve` will tell
};

class training_memory {
 public:
  struct options {
    memhandover::broker_options broker;
    std::string name;
    std::size_t alignment = 64;  ///< of every allocation
    std::uint32_t grow_by = 1;   ///< chunks asked for at least, so that asking is rare
    memhandover::chunk_space::backing persistent = memhandover::chunk_space::backing::pool;
    std::shared_ptr<memhandover::cuda_driver const> driver{};  ///< null on the host
    launch_gate* gate = nullptr;                               ///< of the device; null on the host
  };

  /// Joins the pool. Throws as `training_client::join` does.
  explicit training_memory(options how);
  training_memory(training_memory const&) = delete;
  training_memory& operator=(training_memory const&) = delete;
  /// Leaves it. A demand that comes meanwhile is given nothing; what there is comes free when no
  /// mapping is left.
  ~training_memory();

  [[nodiscard]] memhandover::training_client& client() noexcept { return *client_; }
  /// On the host: whoever computes with this memory says here when.
  [[nodiscard]] operator_gate& operators() noexcept { return operators_; }

  // --- micro-batches, from the training thread
  /// Waits until the last commit has been made.
  void begin();
  /// Waits until what the micro-batch has launched is with the device; or, if the caller can undo what
  /// it does meanwhile (`may_defer`), leaves the commit behind that.
  [[nodiscard]] commit_start commit_begin(bool may_defer);
  /// On CUDA `outlived` says that something made in the micro-batch lives on; its arena is then kept.
  /// On the host the arena shows it.
  void commit_end(bool outlived);
  /// After a deferred one has ended: waits until it is known whether it counts. False: none of its
  /// launches was made, because the micro-batch was taken away. Nothing if the deadline
  /// (CLOCK_MONOTONIC) passes.
  [[nodiscard]] std::optional<bool> commit_resolve(std::int64_t deadline_ns);
  /// Waits until the launches of the last that counts have been made; false if the deadline passes.
  [[nodiscard]] bool await_commit(std::int64_t deadline_ns);
  void discard();
  /// From now on micro-batches work together with those of other processes (collectives in forward or
  /// backward): all of them keep one, or all run it again. Their commits are not deferred. On the host whoever calls
  /// `commit_begin` has asked the others before.
  void work_together(bool together);
  /// They end with that communicator of NCCL; false if its ranks do not agree.
  [[nodiscard]] bool end_with(void* communicator);
  /// Others have dropped the micro-batch that is running: it has to be discarded, its memory stays. `is_running`: whether
  /// it still is that one.
  void drop_micro_batch(std::function<bool()> const& is_running);
  /// Counts the micro-batches, each try of one.
  [[nodiscard]] std::uint64_t micro_batch() const noexcept { return micro_batch_.load(); }
  /// When launches were let through again after memory of a micro-batch had gone last; 0: never.
  [[nodiscard]] std::int64_t reopened_ns() const noexcept { return reopened_ns_.load(); }
  [[nodiscard]] arena_state state() const noexcept {
    return state_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint64_t generation() const noexcept {
    return generation_.load(std::memory_order_acquire);
  }
  /// True in the thread that commits, between commit_begin and commit_end.
  [[nodiscard]] static bool committing() noexcept;
  /// A demand waits for a commit to end.
  [[nodiscard]] bool urgent() const noexcept { return urgent_.load(std::memory_order_acquire); }
  /// Allocations that live in revoked arenas.
  [[nodiscard]] std::uint64_t survivors() const;
  [[nodiscard]] std::uint64_t peak_bytes() const;
  [[nodiscard]] std::uint64_t capacity_bytes() const;
  /// What of the pool this job holds that is not the arena's.
  [[nodiscard]] std::uint64_t kept_bytes() const;
  /// What the arena had when an allocation last found too little; all of the pool where not even
  /// that would have done. By the time that somebody asks, the pool may have more to give again.
  [[nodiscard]] std::uint64_t starved_bytes() const;
  /// What the arena could have if the server gave everything back.
  [[nodiscard]] std::uint64_t reachable_bytes() const;
  bool wait_capacity(std::uint64_t bytes, std::chrono::milliseconds patience);

  // --- allocation
  /// Throws `cancelled` if the micro-batch's memory has been taken away, `out_of_memory` if the
  /// pool grants too little. On CUDA the micro-batch is then aborted and gets addresses without
  /// memory, and it throws only when these are used up.
  [[nodiscard]] std::byte* allocate_arena(std::size_t bytes);
  [[nodiscard]] std::byte* allocate_persistent(std::size_t bytes);
  /// Whether `address` was an allocation of ours; it is free afterwards.
  bool free(std::byte* address);
  [[nodiscard]] bool owns(void const* address) const;
  /// Whether `address` lies in an arena that no micro-batch uses any more: freeing it may unmap what
  /// the device is still working on.
  [[nodiscard]] bool is_former(void const* address) const;
  /// The allocation of persistent memory that `address` lies in, as base and size; {null, 0} if
  /// none.
  [[nodiscard]] std::pair<std::byte*, std::size_t> persistent_range(std::byte* address) const;
  /// What `allocate_persistent` would find without waiting for the server.
  [[nodiscard]] std::uint64_t persistent_free_bytes() const;
  /// Shows in the mailbox how much persistent memory nothing uses that is kept all the same.
  void publish_stranded() const;
  /// Who holds the pool's memory and what would leave this job more of it, in two sentences.
  [[nodiscard]] std::string shortage() const;

  // --- fork (host backend)
  // The child keeps what was allocated, unchanged, in private pages, and is no part of the pool.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  using space = memhandover::chunk_space;

  /// What becomes of the chunks when all that is revocable is taken, and what that was worked out
  /// from.
  struct division {
    std::size_t revocable = 0;
    std::size_t stock = 0;
    std::uint64_t generation = 0;
    std::vector<std::uint32_t> given, kept;
    std::uint32_t live = 0;  ///< of those given, from a micro-batch that was running
  };

  [[nodiscard]] memhandover::demand_answer answer(memhandover::demand const& wanted);
  [[nodiscard]] memhandover::demand_answer give_up(memhandover::demand const& wanted);
  void take_for(memhandover::demand const& wanted, std::unique_lock<std::mutex>& lock,
                memhandover::demand_answer& answer);
  void finish_answer(std::span<std::uint32_t const> given) noexcept;
  void finish_revocation() noexcept;
  /// Chunks of ours that hold nothing.
  [[nodiscard]] std::uint32_t unused() const {
    return stock_->size() + static_cast<std::uint32_t>(unmapping_.size());
  }
  [[nodiscard]] std::uint32_t idle() const;
  void take_idle(std::uint32_t count, std::vector<std::uint32_t>& given);
  [[nodiscard]] std::vector<space*> revocable() const;
  void note_reopened(bool in_use) noexcept;
  void revoke_behind_gate(memhandover::demand const& wanted, std::unique_lock<std::mutex>& lock,
                          memhandover::demand_answer& answer);
  [[nodiscard]] division divide(std::uint32_t count, std::vector<std::uint32_t> const& given) const;
  [[nodiscard]] bool revoke(division parts, memhandover::demand_answer& answer);
  [[nodiscard]] std::vector<std::uint32_t> choose(std::uint32_t count,
                                                  std::vector<std::uint32_t>& from,
                                                  std::vector<std::uint32_t> const& given) const;
  void give_stock(std::uint32_t count, std::vector<std::uint32_t>& given);
  [[nodiscard]] bool is_on_its_way(std::uint32_t wanted) const;
  [[nodiscard]] bool await_persistent(std::size_t bytes,
                                      std::chrono::steady_clock::time_point deadline, bool& waits,
                                      std::unique_lock<std::mutex>& lock);
  void let_demands_pass(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool fill(space& where, std::size_t bytes, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool reach_commit() noexcept;
  [[nodiscard]] bool keep_together();
  void abort_launches();
  void notify_others();
  void finish_commit(bool outlived) noexcept;
  [[nodiscard]] bool await_commit_end(std::unique_lock<std::mutex>& lock,
                                      memhandover::demand const& wanted);
  void let_idle_go();
  [[nodiscard]] bool an_earlier_job_waits() const;
  void give_way();
  void leave_sparse();
  void give_back_unused(space& of, std::vector<std::unique_ptr<space>> const& list) noexcept;
  void release_chunks(std::vector<std::uint32_t> const& chunks);
  void exchange_idle();
  void give_back_idle_arena(std::uint32_t count);
  [[nodiscard]] std::uint32_t short_for_good(std::uint32_t needed) const;
  [[nodiscard]] std::uint32_t chunks_kept() const;
  [[nodiscard]] std::uint64_t starved_in(std::size_t bytes) const;
  void replace_arena(std::vector<std::unique_ptr<space>>& old);
  void drop_empty(std::vector<std::unique_ptr<space>>& spaces) noexcept;
  [[nodiscard]] std::unique_ptr<space> new_arena(std::uint64_t generation);
  [[nodiscard]] std::unique_ptr<space> new_persistent();
  void publish();
  void publish_kept();

  /// Who can be stopped from computing with the arena.
  [[nodiscard]] launch_gate& computing() noexcept;

  options options_;
  operator_gate operators_;  ///< of the host
  std::unique_ptr<memhandover::device_memory> memory_;
  std::unique_ptr<memhandover::training_client> client_;
  mutable std::mutex mutex_;                ///< guards what follows
  std::condition_variable commit_changed_;  ///< it has ended, or waits for the pool
  /// Threads that wait for the pool, and that a commit may wait for.
  std::uint32_t holding_up_commits_ = 0;
  std::atomic<std::uint32_t> demands_waiting_{0};  ///< the control thread wants the lock
  std::condition_variable demand_answered_;        ///< or waits for a commit
  enum class phase { idle, running, committing } phase_ = phase::idle;
  bool deferred_ = false;              ///< the commit; of the thread that commits alone
  std::atomic<bool> together_{false};  ///< see `work_together`
  bool others_know_ = true;            ///< that the micro-batch runs again; guarded by mutex_
  std::atomic<bool> outlives_{false};  ///< what was made in the deferred commit's micro-batch
  std::optional<memhandover::chunk_history> history_;  ///< spaces tell it what becomes of them
  std::unique_ptr<space> arena_;
  std::unique_ptr<space> persistent_;
  std::uint64_t demands_answered_ = 0;
  std::uint32_t waits_to_stand_back_ = 0;  ///< after way has been given
  std::uint64_t turns_ = 0;                ///< commits, and waits for memory that were in vain
  /// Turns when idle persistent chunks go again; 0: none have gone yet.
  std::uint64_t idle_go_at_ = 0;
  std::uint32_t least_idle_ = 0;  ///< persistent chunks, since that was last done
  std::vector<std::unique_ptr<space>> retired_;
  std::vector<std::unique_ptr<space>> promoted_;
  std::vector<std::unique_ptr<space>> sparse_;  ///< former persistent memory
  std::optional<chunk_stock> stock_;            ///< ours, not mapped
  std::vector<std::uint32_t> unmapping_;  ///< ours, still mapped in an arena that has been revoked
  bool unmaps_used_ = false;              ///< a micro-batch was running in it
  std::condition_variable unmapped_;
  std::size_t peak_ = 0;
  std::int64_t begun_ns_ = 0;                 ///< when the micro-batch began …
  std::optional<std::int64_t> lost_ns_;       ///< … and when its memory went
  std::atomic<std::int64_t> reopened_ns_{0};  ///< see `reopened_ns`
  bool began_empty_ = true;  ///< nothing lay in the arena when the micro-batch began
  std::uint64_t starved_bytes_ = 0;
  std::vector<std::pair<space*, std::byte*>> fork_copies_;
  std::atomic<arena_state> state_{arena_state::sound};
  std::atomic<std::uint64_t> generation_{1};
  std::atomic<std::uint64_t> micro_batch_{0};
  std::atomic<bool> urgent_{false};
};

}  // namespace sluice::step
