/// Memory of a job that lasts, given to the server all the same: its contents wait in host memory, and the job is held
/// until they are back.
///
///   resident ──take──► parked ──wanted, chunks granted──► coming back ──► resident, the gate opens
///
/// From the first chunk on that has gone the gate is closed, and it opens when the last has come back. Who is held wants that,
/// as does an allocation that needs more memory, and on the host who touches it; nothing else of the job is relied on,
/// neither its locks nor Python. After that the job stays for a while, and while it is away its memory is owed to it in time, as
/// the server's rules for turns have it (scheduler/parking_turns.hpp): the ledger's header has them, the job's mailbox what
/// comes of them.
///
/// An operator can order it to go (`client_entry::held_until_ns`): then it goes without a demand, and whatever is wanted, it
/// does not come back before the order ends.
///
///   auto const parking = std::make_shared<job_parking>(parts);
///   client.meanwhile([parking] { return parking->advance(); });
///   parking->take(wanted, 12, given);  // what nothing else has given to a demand
///   parking->want();                   // a launch is held
///
/// Thread-safety: `take`, `has_order` and `advance` from the control thread, `want`, `note_held` and `is_resident` from any;
/// the rest with the lock.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "memhandover/client/pinned_copies.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/parking/return_estimate.hpp"
#include "memhandover/parking/tenant_parking.hpp"
#include "runtime/step/launch_gate.hpp"
#include "runtime/step/training_spaces.hpp"
#include "scheduler/parking_turns.hpp"

namespace sluice::step {

class job_parking {
 public:
  using lock_type = std::unique_lock<std::mutex>;

  /// All must outlive this object, or `stop`.
  struct parts {
    std::mutex& mutex;  ///< "the lock", which guards the spaces
    launch_gate& gate;  ///< of the device, or of the host's operators
    memhandover::tenant_client& client;
    memhandover::host_copy_share& copies;  ///< the client's
    memhandover::device_memory& memory;
    training_spaces& spaces;
    std::shared_ptr<memhandover::cuda_driver const> driver;  ///< null on the host
    /// It has to be back after so long, whatever its share is, since others wait for it. None: there is no such bound.
    std::optional<std::chrono::nanoseconds> longest_absence{};
    /// It is owed its memory as soon as somebody waits for it, and has no share of time: an engine, which others wait for.
    bool is_engine = false;
  };

  explicit job_parking(parts const& of);
  job_parking(job_parking const&) = delete;
  job_parking& operator=(job_parking const&) = delete;
  ~job_parking() = default;

  /// Nothing of the job's memory is missing, and the gate is not closed for this.
  [[nodiscard]] bool is_resident() const noexcept { return resident_.load(); }
  /// Somebody waits for the memory. Takes no lock, and waits for nothing.
  void want() noexcept;
  /// Who does is held in that call since then (CLOCK_MONOTONIC). Likewise. The name stays valid.
  void note_held(char const* call, std::int64_t since_ns) noexcept;
  /// An operator wants all to go, and it has not gone yet.
  [[nodiscard]] bool has_order() const;

  /// Closes the gate and gives up to `count` chunks, each when its contents are in host memory. Fewer where the device does
  /// not come to rest, where there are too few slots, and as soon as the demand does not stand any more. `given`: what the demand will
  /// have besides. Without the lock. For an operator the job is away from then on, whether anything had to be parked or not. Throws as
  /// `tenant_parking::take`.
  void take(memhandover::demand const& wanted, std::uint32_t count,
            std::span<std::uint32_t const> given);
  /// A piece of what is to be done beside demands: pins host memory, and brings the job back if somebody waits for it. When
  /// to come again. Without the lock.
  [[nodiscard]] std::optional<std::chrono::milliseconds> advance();

  // --- with the lock
  /// Returns when all is there, with the lock; the calling thread waits for it. A fork as well: a child would find nothing.
  void await_resident(lock_type& lock);
  /// From now on nothing is taken and nothing comes back.
  void stop(lock_type& lock);
  /// From now on nothing is taken, and what is away comes back for those alone who want it from now on.
  void leave() noexcept;

 private:
  using clock = std::chrono::steady_clock;
  class piece_of_work;

  [[nodiscard]] bool on_gpu() const noexcept { return of_.driver != nullptr; }
  void make_ready();
  void show_parkable();
  [[nodiscard]] bool get_chunks(std::uint32_t needed);
  void note_not_at_rest(bool is_resident);
  [[nodiscard]] bool come_back();
  void set_waiting(bool waits);
  void become_resident();
  void open();
  void follow_rules();
  [[nodiscard]] bool may_be_parked(std::optional<clock::time_point> return_by) const;
  [[nodiscard]] clock::duration expected_coming() const;
  [[nodiscard]] clock::time_point owed_at() const;
  void show_turns(bool waits);
  void note_back(clock::duration coming);
  void show_parked();
  [[nodiscard]] bool is_held() const noexcept;
  void show(memhandover::park_state where) noexcept;
  void end_order();
  void hear_of_waking();
  void report_held();

  parts of_;
  memhandover::pinned_copies pinned_;
  std::unique_ptr<memhandover::tenant_parking> parking_;  ///< once all host memory is pinned
  std::atomic<bool> resident_{true};
  std::atomic<bool> wanted_{false};
  std::atomic<bool> leaving_{false};
  /// When who is held longest began to wait, and in what; 0: nobody is.
  std::atomic<std::int64_t> held_since_ns_{0};
  std::atomic<char const*> held_in_{nullptr};
  // Of the control thread.
  bool is_ready_ = false;  ///< or never will be
  bool shows_waiting_ = false;
  clock::time_point left_at_{};
  clock::duration going_{};  ///< how long what is away has taken
  scheduler::parking_turns turns_{{}};
  scheduler::turn_rules rules_{};
  clock::duration swap_{};  ///< what going and coming took, the last time
  memhandover::return_estimate coming_;
  bool has_all_ = false;      ///< chunks for what is parked; they need only be mapped and filled
  std::int64_t returns_ = 0;  ///< times that it has had them
  bool obeyed_ = false;       ///< the operator's order that stands
  std::uint64_t order_seen_ = 0;       ///< `client_entry::held_until_ns` when it was looked at last
  std::int64_t obey_again_at_ns_ = 0;  ///< after the device did not come to rest
  bool reported_held_ = false;         ///< in this absence
  // Guarded by the lock.
  bool busy_ = false;  ///< the control thread uses the spaces
  bool stopped_ = false;
  std::condition_variable changed_;
};

}  // namespace sluice::step
