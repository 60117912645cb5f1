#include "runtime/step/operator_gate.hpp"

#include <utility>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/rank_agreement.hpp"

namespace sluice::step {

void operator_gate::operator_begin() {
  for (;;) {
    running_.fetch_add(1);
    if (!closed_.load()) {
      return;
    }
    leave();
    std::unique_lock lock{mutex_};
    opened_.wait(lock, [this] { return !closed_.load(); });
  }
}

void operator_gate::operator_pass() noexcept {
  running_.fetch_add(1);
}

void operator_gate::operator_end() noexcept {
  if (closed_.load()) {
    ended_ns_.store(memhandover::monotonic_ns());
  }
  leave();
}

void operator_gate::leave() noexcept {
  if (running_.fetch_sub(1) == 1 && closed_.load()) {
    // Whoever waits has looked before it sleeps, or looks again.
    std::lock_guard const lock{mutex_};
    none_runs_.notify_one();
  }
}

bool operator_gate::close(std::int64_t /*deadline_ns*/) {
  ended_ns_.store(0);
  closed_.store(true);
  paused_ = ranks_.load();
  if (paused_ != nullptr) {
    paused_->pause();
  }
  return true;
}

bool operator_gate::wait_idle(std::int64_t deadline_ns) {
  if (paused_ != nullptr && !paused_->await_debts(deadline_ns)) {
    return false;
  }
  auto const patience = std::chrono::nanoseconds{deadline_ns - memhandover::monotonic_ns()};
  std::unique_lock lock{mutex_};
  return none_runs_.wait_for(lock, patience, [this] { return running_.load() == 0; });
}

void operator_gate::open() {
  {
    std::lock_guard const lock{mutex_};
    closed_.store(false);
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
