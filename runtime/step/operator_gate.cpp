#include "runtime/step/operator_gate.hpp"

#include <algorithm>
#include <utility>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/rank_agreement.hpp"

namespace sluice::step {

void operator_gate::operator_begin(operator_memory uses) {
  for (;;) {
    running(uses).fetch_add(1);
    if (!holds(uses)) {
      return;
    }
    leave(uses);
    await_opening(uses);
  }
}

/// Asks once for each time that memory is parked meanwhile.
void operator_gate::await_opening(operator_memory uses) {
  std::uint64_t asked_in = 0;
  std::unique_lock lock{mutex_};
  opened_.wait(lock, [&] {
    bool const is_parked = parkings_ % 2 == 1;
    if (holds(uses) && is_parked && asked_in != parkings_) {
      asked_in = parkings_;
      on_held_parked_();
    }
    return !holds(uses);
  });
}

void operator_gate::set_parked(bool parked) {
  {
    std::lock_guard const lock{mutex_};
    parkings_ += (parkings_ % 2 == 1) == parked ? 0 : 1;
  }
  opened_.notify_all();
}

void operator_gate::operator_pass() noexcept {
  in_arena_.fetch_add(1);
}

void operator_gate::operator_end(operator_memory uses) noexcept {
  if (holds(uses)) {
    ended_ns_.store(memhandover::monotonic_ns());
  }
  leave(uses);
}

bool operator_gate::holds(operator_memory uses) const noexcept {
  return closed_.load() >= (uses == operator_memory::arena ? closed_to::arena : closed_to::all);
}

void operator_gate::leave(operator_memory uses) noexcept {
  if (running(uses).fetch_sub(1) == 1 && holds(uses)) {
    // Whoever waits has looked before it sleeps, or looks again.
    std::lock_guard const lock{mutex_};
    none_runs_.notify_one();
  }
}

bool operator_gate::close(std::int64_t /*deadline_ns*/) {
  shut(closed_to::arena);
  return true;
}

bool operator_gate::close_all(std::int64_t /*deadline_ns*/) {
  shut(closed_to::all);
  return true;
}

void operator_gate::shut(closed_to whom) noexcept {
  ended_ns_.store(0);
  closed_.store(std::max(whom, closed_.load()));  // only this thread writes
  if (paused_ == nullptr) {                       // until it is opened, once
    paused_ = ranks_.load();
    if (paused_ != nullptr) {
      paused_->pause();
    }
  }
}

bool operator_gate::is_idle() const noexcept {
  return in_arena_.load() == 0 && (closed_.load() != closed_to::all || elsewhere_.load() == 0);
}

bool operator_gate::wait_idle(std::int64_t deadline_ns) {
  if (paused_ != nullptr && !paused_->await_debts(deadline_ns)) {
    return false;
  }
  auto const patience = std::chrono::nanoseconds{deadline_ns - memhandover::monotonic_ns()};
  std::unique_lock lock{mutex_};
  return none_runs_.wait_for(lock, patience, [this] { return is_idle(); });
}

void operator_gate::open() {
  {
    std::lock_guard const lock{mutex_};
    closed_.store(closed_to::nobody);
  }
  opened_.notify_all();
  if (auto* const ranks = std::exchange(paused_, nullptr)) {
    ranks->resume();
  }
}

void operator_gate::run_again() {
  if (auto* const ranks = ranks_.load()) {
    ranks->run_again();
  }
}

}  // namespace sluice::step
