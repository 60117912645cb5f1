#include "runtime/step/micro_batch_cycle.hpp"

#include <limits>
#include <utility>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;

constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

thread_local bool commits_here = false;

}  // namespace

micro_batch_cycle::micro_batch_cycle(std::mutex& mutex, launch_gate* gate, launch_gate& computing,
                                     std::function<void(bool outlived)> committed)
    : mutex_(mutex), gate_(gate), computing_(computing), committed_(std::move(committed)) {}

bool micro_batch_cycle::committing() noexcept {
  return commits_here;
}

void micro_batch_cycle::await_last() {
  if (deferred_) {
    static_cast<void>(commit_resolve(never));
  }
  static_cast<void>(await_commit(never));
}

void micro_batch_cycle::begin() noexcept {
  state_.store(arena_state::sound, std::memory_order_release);
  phase_ = phase::running;
  micro_batch_.fetch_add(1);
  others_know_ = false;
  begun_ns_ = monotonic_ns();
  lost_ns_.reset();
}

void micro_batch_cycle::work_together(bool together) {
  together_.store(together);
  if (gate_ != nullptr) {
    gate_->allow_inside(together);
  }
}

bool micro_batch_cycle::end_with(void* communicator) {
  return gate_ != nullptr && gate_->end_with(communicator);
}

void micro_batch_cycle::drop(std::function<bool()> const& is_running) {
  std::lock_guard const lock{mutex_};
  if (phase_ != phase::running || state() != arena_state::sound || !is_running()) {
    return;
  }
  others_know_ = true;
  state_.store(arena_state::revoked, std::memory_order_release);
  lost_ns_ = lost_ns_.value_or(monotonic_ns());
  if (gate_ != nullptr) {
    abort();
  }
}

/// Others hear of it only when launches are dropped: nothing of the micro-batch may be taken for a launch of the next
/// try.
void micro_batch_cycle::abort() {
  gate_->abort_begin();
  run_again();
}

void micro_batch_cycle::end_abort() {
  if (gate_ != nullptr) {
    gate_->abort_end();
  }
}

void micro_batch_cycle::run_again() {
  if (together_.load() && !std::exchange(others_know_, true)) {
    computing_.run_again();
  }
}

bool micro_batch_cycle::revoke(std::int64_t at_ns) noexcept {
  state_.store(arena_state::revoked, std::memory_order_release);
  if (phase_ != phase::running) {
    return false;
  }
  lost_ns_ = lost_ns_.value_or(at_ns);
  return true;
}

void micro_batch_cycle::starve() {
  state_.store(arena_state::starved, std::memory_order_release);
  lost_ns_ = lost_ns_.value_or(monotonic_ns());
  if (phase_ != phase::running) {
    return;
  }
  if (gate_ != nullptr) {
    abort();
  } else {
    run_again();
  }
}

void micro_batch_cycle::note_reopened() noexcept {
  reopened_ns_.store(monotonic_ns());
}

/// Reaches the commit when all processes agree to it.
bool micro_batch_cycle::keep_together() {
  struct question {
    micro_batch_cycle& cycle;
    bool kept = false;
  } asked{*this};
  auto const keep = [](void* of) {
    auto& self = *static_cast<question*>(of);
    self.kept = self.cycle.reach_commit();
  };
  return state() == arena_state::sound && gate_->keep(keep, &asked) && asked.kept;
}

commit_start micro_batch_cycle::commit_begin(bool may_defer) {
  bool const together = gate_ != nullptr && together_.load();
  deferred_ =
      may_defer && !together && gate_ != nullptr && state() == arena_state::sound &&
      gate_->defer_commit(
          [](void* of) { return static_cast<micro_batch_cycle*>(of)->reach_commit() ? 1 : 0; },
          this);
  if (!deferred_) {
    if (gate_ != nullptr) {
      gate_->flush();  // while the micro-batch can still be taken away
    }
    if (!(together ? keep_together() : reach_commit())) {
      return commit_start::taken_away;
    }
  }
  commits_here = true;
  return deferred_ ? commit_start::deferred : commit_start::begun;
}

/// All that the micro-batch has launched is with the device, or about to be, or has been dropped.
bool micro_batch_cycle::reach_commit() noexcept {
  {
    std::lock_guard const lock{mutex_};
    if (state_.load(std::memory_order_relaxed) != arena_state::sound) {
      return false;
    }
    phase_ = phase::committing;
  }
  notify();
  return true;
}

void micro_batch_cycle::commit_end(bool outlived) {
  commits_here = false;
  if (deferred_) {
    outlives_.store(outlived, std::memory_order_relaxed);
    gate_->end_commit(
        [](void* of) {
          auto& self = *static_cast<micro_batch_cycle*>(of);
          self.finish_commit(self.outlives_.load(std::memory_order_relaxed));
        },
        this);
    return;
  }
  if (gate_ != nullptr) {
    gate_->flush();  // what counts as committed is with the device, and reads no arena later
  }
  finish_commit(outlived);
}

std::optional<bool> micro_batch_cycle::commit_resolve(std::int64_t deadline_ns) {
  if (deferred_ && commits_here) {
    commit_end(true);  // it was left in the middle
  }
  std::optional<bool> const counts = deferred_ ? gate_->resolve_commit(deadline_ns) : true;
  deferred_ = deferred_ && !counts.has_value();
  return counts;
}

bool micro_batch_cycle::await_commit(std::int64_t deadline_ns) {
  return gate_ == nullptr || gate_->await_commit(deadline_ns);
}

void micro_batch_cycle::finish_commit(bool outlived) noexcept {
  {
    std::lock_guard const lock{mutex_};
    phase_ = phase::idle;
    committed_(outlived);
  }
  notify();
}

void micro_batch_cycle::discard_begin() {
  phase_ = phase::idle;
  commits_here = false;
  run_again();
}

std::optional<std::chrono::nanoseconds> micro_batch_cycle::discard_end(bool has_arena) noexcept {
  if (has_arena) {
    state_.store(arena_state::sound, std::memory_order_release);
  }
  auto const lost = std::exchange(lost_ns_, std::nullopt);
  return lost ? std::optional{std::chrono::nanoseconds{*lost - begun_ns_}} : std::nullopt;
}

}  // namespace sluice::step
