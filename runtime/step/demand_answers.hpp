/// What the server's demands get of a training job's memory, on the job's control thread.
///
/// A demand takes the whole arena: at once while no micro-batch runs; while one does, and it is discarded; after its end
/// while it commits. It never waits for a commit that waits for the pool itself: then it is given what nothing uses,
/// and the server decides.
///
///   noticed ──► commit awaited ──► what nothing uses, if that will do
///                                     └── else gate closed ──► device idle ──► revoked, gate open on the host
///   with the server ──► swept on the host; on CUDA unmapped, gate open
///
/// Victims, in this order: chunks without a mapping, idle chunks at the end of arena and of persistent memory, then the
/// arena as a whole, and in the end what lasts, which is parked (job_parking.hpp); on CUDA nothing with a mapping goes but behind
/// the closed gate. What fails on the way is logged, what has
/// been taken until then is the server's, and nobody stays held.
///
///   demand_answers answers{mutex, cycle, nullptr, operators};
///   auto client = tenant_client::join(broker, client_kind::training, "job",
///                                     [&](demand const& d) { return answers.answer(d); });
///   {
///     std::lock_guard const lock{mutex};
///     answers.serve_from(spaces, memory, history);
///   }
///
/// Thread-safety: `answer`, and what it leaves for afterwards, from the control thread; the rest as it says. The lock is not
/// held while a commit or the gate is waited for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "memhandover/client/tenant_client.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "runtime/step/job_parking.hpp"
#include "runtime/step/launch_gate.hpp"
#include "runtime/step/micro_batch_cycle.hpp"
#include "runtime/step/training_spaces.hpp"

namespace sluice::step {

class demand_answers {
 public:
  using lock_type = std::unique_lock<std::mutex>;

  /// `mutex`: the owner's, "the lock". `gate`: of the device, null on the host. `computing`: who can be stopped from
  /// computing, the same or the operators of the host. All must outlive this object.
  demand_answers(std::mutex& mutex, micro_batch_cycle& cycle, launch_gate* gate,
                 launch_gate& computing);

  /// The handler of `tenant_client`. Until `serve_from` and after `stop` demands are given nothing.
  [[nodiscard]] memhandover::demand_answer answer(memhandover::demand const& wanted);

  /// Gives all that can be given, since an operator wants the job to be parked; less where a demand comes in between, which
  /// goes first: then it is to be called again. On the control thread.
  void obey_operator(memhandover::tenant_client& client);

  // --- with the lock
  /// `spaces` must live until `stop`, the others as long as the control thread.
  void serve_from(training_spaces& spaces, memhandover::device_memory& memory,
                  memhandover::chunk_history& history) noexcept;
  /// Where all that is too little, this parks the rest. It must live as long as the control thread.
  void park_with(job_parking& parking) noexcept { parking_ = &parking; }
  /// Waits until what has been revoked is unmapped.
  void stop(lock_type& lock);
  /// How many demands took what they found.
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  /// Waits until the control thread has answered what it is being asked, unless that waits for a commit, which may need
  /// what the caller holds.
  void let_pass(lock_type& lock);
  /// Waits until chunks that stay the job's of what has been revoked are in its stock.
  void await_stock(lock_type& lock);

  /// A demand waits for a commit to end. From any thread.
  [[nodiscard]] bool urgent() const noexcept { return urgent_.load(std::memory_order_acquire); }

 private:
  /// What becomes of the chunks when all that is revocable is taken, and what that was worked out
  /// from.
  struct division {
    std::size_t revocable = 0;
    std::size_t stock = 0;
    std::uint64_t generation = 0;
    std::vector<std::uint32_t> given, kept;
    std::uint32_t live = 0;  ///< of those given, from a micro-batch that was running
  };

  [[nodiscard]] memhandover::demand_answer give_up(memhandover::demand const& wanted);
  void take_for(memhandover::demand const& wanted, lock_type& lock,
                memhandover::demand_answer& answer);
  [[nodiscard]] bool await_commit_end(lock_type& lock, memhandover::demand const& wanted);
  void revoke_behind_gate(memhandover::demand const& wanted, lock_type& lock,
                          memhandover::demand_answer& answer);
  [[nodiscard]] division divide(std::uint32_t count, std::vector<std::uint32_t> const& given) const;
  [[nodiscard]] bool revoke(division parts, memhandover::demand_answer& answer);
  void finish_answer(std::span<std::uint32_t const> given) noexcept;
  void finish_revocation() noexcept;
  void park_rest(memhandover::demand const& wanted, lock_type& lock,
                 memhandover::demand_answer const& answer);
  void open(launch_gate& gate) const;

  std::mutex& mutex_;
  micro_batch_cycle& cycle_;
  launch_gate* gate_;
  launch_gate& computing_;
  std::atomic<std::uint32_t> waiting_{
      0};  ///< the control thread wants the lock, or waits for a commit
  std::atomic<bool> urgent_{false};
  // Guarded by the lock.
  training_spaces* spaces_ = nullptr;
  memhandover::device_memory* memory_ = nullptr;
  memhandover::chunk_history* history_ = nullptr;
  job_parking* parking_ = nullptr;
  std::uint64_t count_ = 0;
  bool unmaps_used_ = false;  ///< a micro-batch was running in what is still to be unmapped
  std::condition_variable unmapped_;
};

}  // namespace sluice::step
