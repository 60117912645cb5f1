/// Waiting until streams are idle, and until the unit that is executing has ended.
#include "runtime/gate/streams.hpp"

#include <sched.h>

#include <algorithm>
#include <new>

#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {

bool stream_registry::mark(stream_state& state) {
  auto* stream = static_cast<CUstream>(state.key_.handle);
  if (!driver::takes_events(stream)) {
    return false;
  }
  if (state.drained_ == nullptr) {
    state.drained_ = take_event(state.context_);
  }
  return state.drained_ != nullptr && driver::record(state.drained_, stream);
}

stream_registry::watch_list stream_registry::mark_all(bool reset) {
  watch_list watched;
  std::lock_guard const guard{known_};
  watched.all.reserve(orphans_.size() + by_key_.size());
  watched.streams.reserve(by_key_.size());
  watched.all.assign(orphans_.begin(), orphans_.end());
  try {
    for (auto const& [key, state] : by_key_) {
      if (!state->dirty.load(std::memory_order_acquire)) {
        continue;
      }
      std::lock_guard const inner{state->lock_};
      driver::in_context const there{state->context_};
      if (key.belongs_to_thread() ? state->drained_ == nullptr
                                  : !there.entered() || !mark(*state)) {
        continue;
      }
      watched.all.push_back({state->drained_, state->context_});
      watched.streams.push_back(state);
      if (reset) {
        state->dirty.store(false, std::memory_order_release);
      }
    }
  } catch (...) {
    make_dirty(watched);
    throw;
  }
  return watched;
}

void stream_registry::make_dirty(watch_list const& watched) noexcept {
  for (stream_state* state : watched.streams) {
    state->dirty.store(true, std::memory_order_release);
  }
}

bool stream_registry::has_completed(marker const& one) {
  driver::in_context const there{one.context};
  return !there.entered() || driver::has_completed(one.event);
}

void stream_registry::watch_unit() noexcept {
  driver::beside_captures const safe;
  std::scoped_lock const guard{watching_, known_};
  units_.clear();
  unit_ended_ns_.store(0, std::memory_order_release);
  try {
    units_.reserve(by_key_.size());
  } catch (std::bad_alloc const&) {
    return;  // then it is not known when the unit has ended
  }
  for (auto const& [key, state] : by_key_) {
    if (!state->dirty.load(std::memory_order_acquire)) {
      continue;
    }
    std::lock_guard const inner{state->lock_};
    driver::in_context const there{state->context_};
    while (there.entered() && state->ahead_.oldest() != nullptr &&
           take_news(*state, monotonic_ns())) {
    }
    if (auto const* unit = state->ahead_.oldest(); unit != nullptr && unit->alone) {
      units_.push_back({static_cast<CUevent>(unit->event), state->context_});
    }
  }
}

void stream_registry::poll_unit() {
  std::lock_guard const guard{watching_};
  if (units_.empty()) {
    return;
  }
  driver::beside_captures const safe;
  std::erase_if(units_, has_completed);
  unit_ended_ns_.store(monotonic_ns(), std::memory_order_release);
}

bool stream_registry::wait_idle(std::int64_t deadline_ns, bool reset) {
  std::shared_lock const guard{draining_};
  driver::beside_captures const safe;
  watch_list watched = mark_all(reset);
  for (marker const& one : watched.all) {
    while (!has_completed(one)) {
      if (reset) {
        poll_unit();
      }
      if (monotonic_ns() >= deadline_ns) {
        make_dirty(watched);
        return false;
      }
      ::sched_yield();
    }
  }
  if (reset) {
    for (stream_state* state : watched.streams) {
      std::lock_guard const inner{state->lock_};
      forget_markers(*state);
    }
  }
  std::lock_guard const inner{known_};
  orphans_.remove_if([&](marker const& orphan) {
    bool const done = has_completed(orphan);
    if (done) {
      return_event(orphan.context, orphan.event);
    }
    return done;
  });
  return true;
}

bool stream_registry::are_idle() {
  std::shared_lock const guard{draining_};
  driver::beside_captures const safe;
  std::lock_guard const inner{known_};
  for (auto const& [key, state] : by_key_) {
    if (state->dirty.load(std::memory_order_acquire) && !is_idle(*state)) {
      return false;
    }
  }
  return std::all_of(orphans_.begin(), orphans_.end(), has_completed);
}

void stream_registry::are_clean() noexcept {
  std::lock_guard const guard{known_};
  for (marker const& orphan : orphans_) {
    return_event(orphan.context, orphan.event);
  }
  orphans_.clear();
  for (auto const& [key, state] : by_key_) {
    state->dirty.store(false, std::memory_order_release);
  }
}

/// Asked without an event: one that is recorded between two launches costs the device microseconds.
bool stream_registry::is_idle(stream_state const& state) {
  if (state.key_.belongs_to_thread()) {
    return state.drained_ == nullptr || has_completed({state.drained_, state.context_});
  }
  driver::in_context const there{state.context_};
  auto* const stream = static_cast<CUstream>(state.key_.handle);
  return !there.entered() || !driver::takes_events(stream) || driver::has_done_all(stream);
}

bool stream_registry::leaves_marker(stream_state& state) {
  if (state.key_.belongs_to_thread()) {
    return state.drained_ !=
           nullptr;  // the thread is ending: the driver may have forgotten it already
  }
  driver::beside_captures const safe;
  driver::in_context const there{state.context_};
  return there.entered() && mark(state);
}

}  // namespace sluice::gate
