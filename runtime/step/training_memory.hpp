/// All pool memory of a training process: the step arena, persistent memory, and chunks in between.
///
/// It is made of three parts, under one lock, and adds who allocates and waits:
///
///   training_spaces     arena and persistent memory, what has been put away of them, chunks in between
///   micro_batch_cycle   idle, running, committing; whether the arena is sound
///   demand_answers      what a demand takes, on the control thread; it knows the other two
///
/// Thread-safety: all functions from any thread. No lock is held while waiting for the pool.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "runtime/step/demand_answers.hpp"
#include "runtime/step/fork_copies.hpp"
#include "runtime/step/job_parking.hpp"
#include "runtime/step/launch_gate.hpp"
#include "runtime/step/micro_batch_cycle.hpp"
#include "runtime/step/operator_gate.hpp"
#include "runtime/step/training_spaces.hpp"

namespace sluice::step {

class training_memory {
 public:
  struct options {
    memhandover::broker_options broker;
    std::string name;
    memhandover::client_kind kind = memhandover::client_kind::training;  ///< or an engine
    std::size_t alignment = 64;                                          ///< of every allocation
    std::uint32_t grow_by = 1;  ///< chunks asked for at least, so that asking is rare
    memhandover::chunk_space::backing persistent = memhandover::chunk_space::backing::pool;
    std::shared_ptr<memhandover::cuda_driver const> driver{};  ///< null on the host
    launch_gate* gate = nullptr;                               ///< of the device; null on the host
    memhandover::unparkable why_unparkable = memhandover::unparkable::none;  ///< as it was started
    /// See `job_parking::parts`.
    std::optional<std::chrono::nanoseconds> longest_absence{};
    memhandover::job_wish wish{};  ///< of a training job
  };

  /// Joins the pool. Throws as `tenant_client::join` does.
  explicit training_memory(options how);
  training_memory(training_memory const&) = delete;
  training_memory& operator=(training_memory const&) = delete;
  /// Leaves it. A demand that comes meanwhile is given nothing; what there is comes free when no
  /// mapping is left.
  ~training_memory();

  [[nodiscard]] memhandover::tenant_client& client() noexcept { return *client_; }
  /// On the host: whoever computes with this memory says here when.
  [[nodiscard]] operator_gate& operators() noexcept { return operators_; }
  [[nodiscard]] memhandover::client_kind kind() const noexcept { return options_.kind; }

  /// Stands for a piece.
  using space_id = std::uint64_t;

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
  [[nodiscard]] std::uint64_t micro_batch() const noexcept { return cycle_.micro_batch(); }
  /// When launches were let through again after memory of a micro-batch had gone last; 0: never.
  [[nodiscard]] std::int64_t reopened_ns() const noexcept { return cycle_.reopened_ns(); }
  [[nodiscard]] arena_state state() const noexcept { return cycle_.state(); }
  [[nodiscard]] std::uint64_t generation() const noexcept { return spaces_->generation(); }
  /// True in the thread that commits, between commit_begin and commit_end.
  [[nodiscard]] static bool committing() noexcept { return micro_batch_cycle::committing(); }
  /// A demand waits for a commit to end.
  [[nodiscard]] bool urgent() const noexcept { return answers_.urgent(); }
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
  /// Persistent memory that the caller maps where it likes, all of it or none: chunks for `bytes`, nowhere at first. Each waits until
  /// nothing of the job is parked. `make_piece` throws as `allocate_persistent`; `move_piece`, to addresses where all of its
  /// chunks have room, or for null nowhere, throws what the driver says, and nothing has changed then.
  [[nodiscard]] space_id make_piece(std::size_t bytes);
  void move_piece(space_id piece, std::byte* to);
  void free_piece(space_id piece);
  [[nodiscard]] bool owns(void const* address) const;
  /// Whether `address` lies in an arena that no micro-batch uses any more: freeing it may unmap what
  /// the device is still working on.
  [[nodiscard]] bool is_former(void const* address) const;
  /// The allocation of persistent memory that `address` lies in, as base and size; {null, 0} if
  /// none.
  [[nodiscard]] std::pair<std::byte*, std::size_t> persistent_range(std::byte* address) const;
  /// What `allocate_persistent` would find without waiting for the server.
  [[nodiscard]] std::uint64_t persistent_free_bytes() const;
  /// A thread waits that would not if no memory were parked. Takes no lock.
  void want_parked() noexcept {
    if (parking_ != nullptr && !parking_->is_resident()) {
      parking_->want();
    }
  }
  /// The same thread is held in that call since then (CLOCK_MONOTONIC), which is said once if it lasts.
  void note_held(char const* call, std::int64_t since_ns) noexcept {
    if (parking_ != nullptr) {
      parking_->note_held(call, since_ns);
    }
  }
  /// Shows in the mailbox how much persistent memory nothing uses that is kept all the same.
  void publish_stranded() const;
  /// Who holds the pool's memory and what would leave this job more of it, in two sentences.
  [[nodiscard]] std::string shortage() const;

  /// The process is about to end: from when this returns nobody calls the driver but its own threads, and who brings back what one of
  /// them then wants.
  void leave();

  // --- fork (host backend)
  // The child keeps what was allocated, unchanged, in private pages, and is no part of the pool.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  using space = training_spaces::space;
  /// Of an allocation that the pool has refused.
  struct shortage_wait {
    std::chrono::steady_clock::time_point began;
    bool for_server = false;  ///< there was one that may give something back
  };

  void keep_what_outlived(bool outlived) noexcept;
  [[nodiscard]] std::byte* allocate_lasting(space* piece, std::size_t bytes,
                                            std::unique_lock<std::mutex>& lock);
  void await_all_there(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool fill(space& where, std::size_t bytes, memhandover::precedence turn,
                          std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool await_persistent(space const& where, std::size_t bytes, shortage_wait& wait,
                                      std::unique_lock<std::mutex>& lock);
  /// A demand has parked some of it. While `mutex_` is held and it is not, no more is parked.
  [[nodiscard]] bool is_away() const noexcept;
  [[nodiscard]] bool is_on_its_way(std::uint32_t wanted) const;
  [[nodiscard]] std::uint64_t starved_in(std::size_t bytes) const;
  bool show_need(std::uint32_t chunks, std::chrono::milliseconds patience) noexcept;
  [[nodiscard]] bool take_needed(std::uint32_t chunks);

  /// Who can be stopped from computing with the arena.
  [[nodiscard]] launch_gate& computing() noexcept;
  void make_parkable(memhandover::host_copy_share& copies);
  void show_shortage(std::uint32_t chunks) noexcept;
  [[nodiscard]] bool on_gpu() const noexcept { return options_.gate != nullptr; }

  options options_;
  operator_gate operators_;  ///< of the host
  mutable std::mutex mutex_;
  micro_batch_cycle cycle_;
  demand_answers answers_;
  std::unique_ptr<memhandover::tenant_client> client_;
  std::unique_ptr<memhandover::device_memory> memory_;
  std::optional<memhandover::chunk_history> history_;  ///< spaces record in it what becomes of them
  // Guarded by mutex_.
  std::optional<training_spaces> spaces_;
  job_parking* parking_ = nullptr;  ///< of the client, which has host copies; constant
  fork_copies fork_copies_;
  std::uint32_t waits_to_stand_back_ = 0;  ///< after way has been given
  std::size_t peak_ = 0;
  bool began_empty_ = true;  ///< nothing lay in the arena when the micro-batch began
  std::uint64_t starved_bytes_ = 0;
};

}  // namespace sluice::step
