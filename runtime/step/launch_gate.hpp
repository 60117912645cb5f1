/// What training's memory needs of whoever launches: that it can be stopped, with proof.
#pragma once

#include <cstdint>
#include <optional>

#include "memhandover/client/tenant_client.hpp"

namespace sluice::step {

/// How long is waited for what runs on a device to end before nothing is given: longer than any unit that it may meet. An operator
/// of the host may take many seconds on few processors.
inline constexpr std::int64_t kernel_patience_ns = 2'000'000'000;
inline constexpr std::int64_t operator_patience_ns = 60'000'000'000;

/// How launches are stopped and taken back: of kernels on the device, of operators on the host.
class launch_gate {
 public:
  virtual ~launch_gate() = default;
  /// No launch begins after it returns true; false if a thread stayed inside one until the
  /// deadline.
  virtual bool close(std::int64_t deadline_ns) = 0;
  /// The same for what uses any of the job's memory, not the arena alone; on a device also for what only names it.
  virtual bool close_all(std::int64_t deadline_ns) { return close(deadline_ns); }
  virtual bool wait_idle(std::int64_t deadline_ns) = 0;
  virtual void open() = 0;
  /// Memory is not there (true), or is again: as `set_parked` of sluice_gate_api.
  virtual void set_parked(bool /*parked*/) {}
  virtual void abort_begin() = 0;
  virtual void abort_end() = 0;
  virtual void set_urgent(bool urgent) = 0;
  /// Returns when the device has been given, or has been spared by an abort, all that was launched.
  virtual void flush() {}
  /// As `commit_begin`, `commit_end`, `commit_resolve` and `commit_made` of sluice_gate_api.
  [[nodiscard]] virtual bool defer_commit(int (* /*decide*/)(void* of), void* /*of*/) {
    return false;
  }
  virtual void end_commit(void (* /*made*/)(void* of), void* /*of*/) {}
  [[nodiscard]] virtual std::optional<bool> resolve_commit(std::int64_t /*deadline_ns*/) {
    return true;
  }
  [[nodiscard]] virtual bool await_commit(std::int64_t /*deadline_ns*/) { return true; }
  /// As in sluice_agreement; without one there are no others.
  virtual void allow_inside(bool /*allow*/) {}
  [[nodiscard]] virtual bool end_with(void* /*communicator*/) { return false; }
  [[nodiscard]] virtual bool keep(void (*agreed)(void* of), void* of) {
    agreed(of);
    return true;
  }
  virtual void run_again() {}
  [[nodiscard]] virtual bool others_may_wait() const { return false; }
  /// When the unit that was executing as the gate was closed had ended; 0 if that is not known.
  [[nodiscard]] virtual std::int64_t unit_ended_ns() const { return 0; }
  /// When a launching thread first saw the demand that is being answered; 0 if none did.
  [[nodiscard]] virtual std::int64_t demand_seen_ns() const { return 0; }
  /// Threads are no longer held because of this demand.
  virtual void demand_answered(memhandover::demand const& /*which*/) {}
};

}  // namespace sluice::step
