#include "runtime/gate/streams.hpp"

#include <sched.h>

#include <functional>
#include <utility>

#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {
namespace {

bool is_legacy(stream_use use) {
  return use.handle == CU_STREAM_LEGACY || (use.handle == nullptr && !use.per_thread_default);
}

stream_key key_of(thread_slot const& self, stream_use use) {
  if (is_per_thread(use)) {
    return {CU_STREAM_PER_THREAD, driver::current_context(), &self};
  }
  if (is_legacy(use)) {
    return {CU_STREAM_LEGACY, driver::current_context(), nullptr};
  }
  return {use.handle, nullptr, nullptr};
}

bool belongs_to_thread(stream_key const& key) {
  return key.owner != nullptr;
}

}  // namespace

stream_registry& streams() {
  // Never destroyed: threads launch until the process is gone.
  static stream_registry& one = *std::make_unique<stream_registry>().release();
  return one;
}

std::size_t stream_registry::hash::operator()(stream_key const& key) const noexcept {
  std::hash<void const*> const one{};
  return one(key.handle) ^ (one(key.context) << 1U) ^ (one(key.owner) << 2U);
}

stream_state* stream_registry::find(thread_slot& self, stream_use use) {
  stream_key const key = key_of(self, use);
  std::uint64_t const epoch = epoch_.load(std::memory_order_acquire);
  for (remembered_stream const& known : self.remembered) {
    if (known.epoch == epoch && known.key == key) {
      return known.state;
    }
  }
  stream_state* state = look_up(key);
  if (state != nullptr) {
    self.remembered[self.next_remembered++ % self.remembered.size()] = {key, state, epoch};
  }
  return state;
}

stream_state* stream_registry::look_up(stream_key const& key) {
  CUcontext const context = driver::current_context();
  if (context == nullptr) {
    return nullptr;
  }
  std::lock_guard const guard{known_};
  auto const [where, added] = by_key_.try_emplace(key, nullptr);
  if (added) {
    if (unused_.empty()) {
      where->second = &states_.emplace_back();
    } else {
      where->second = unused_.back();
      unused_.pop_back();
    }
    std::lock_guard const inner{where->second->lock_};
    where->second->key_ = key;
    where->second->context_ = context;
    where->second->device_ = driver::current_device();
  }
  return where->second;
}

CUevent stream_registry::take_event(CUcontext context) {
  {
    std::lock_guard const guard{events_};
    std::vector<CUevent>& spare = spare_events_[context];
    if (!spare.empty()) {
      CUevent event = spare.back();
      spare.pop_back();
      return event;
    }
  }
  return driver::create_event();
}

void stream_registry::return_event(CUcontext context, CUevent event) {
  std::lock_guard const guard{events_};
  spare_events_[context].push_back(event);
}

bool stream_registry::within(thread_slot& self, stream_use use, window_bounds bounds) {
  stream_state* state = find(self, use);
  if (state == nullptr) {
    return true;
  }
  std::lock_guard const guard{state->lock_};
  if (state->outstanding_.size() < bounds.groups) {
    return true;
  }
  driver::beside_captures const safe;
  while (!state->outstanding_.empty() && driver::has_happened(state->outstanding_.front())) {
    return_event(state->context_, state->outstanding_.front());
    state->outstanding_.pop_front();
  }
  return state->outstanding_.size() < bounds.groups;
}

void stream_registry::forgive(thread_slot& self, stream_use use) {
  if (stream_state* state = find(self, use); state != nullptr) {
    std::lock_guard const guard{state->lock_};
    for (CUevent event : std::exchange(state->outstanding_, {})) {
      return_event(state->context_, event);
    }
  }
}

void stream_registry::launched(stream_state& state, window_bounds bounds) {
  std::lock_guard const guard{state.lock_};
  bool const full = bounds.launches != 0 && ++state.since_event_ >= bounds.launches;
  if (!full && !belongs_to_thread(state.key_)) {
    return;
  }
  driver::beside_captures const safe;
  if (belongs_to_thread(state.key_)) {
    // Whether it worked does not matter: a stream in capture has nothing running that could be
    // waited for.
    static_cast<void>(mark(state));
  }
  if (!full) {
    return;
  }
  state.since_event_ = 0;
  auto* stream = static_cast<CUstream>(state.key_.handle);
  if (!driver::takes_events(stream)) {
    return;
  }
  if (CUevent event = take_event(state.context_); event != nullptr) {
    if (driver::record(event, stream)) {
      state.outstanding_.push_back(event);
    } else {
      return_event(state.context_, event);
    }
  }
}

bool stream_registry::mark(stream_state& state) {
  auto* stream = static_cast<CUstream>(state.key_.handle);
  if (!driver::takes_events(stream)) {
    return false;
  }
  if (state.settled_ == nullptr) {
    state.settled_ = take_event(state.context_);
  }
  return state.settled_ != nullptr && driver::record(state.settled_, stream);
}

std::vector<stream_registry::marker> stream_registry::mark_all(bool reset,
                                                               std::vector<stream_state*>& marked) {
  std::vector<marker> markers;
  std::lock_guard const guard{known_};
  for (marker const& orphan : orphans_) {
    markers.push_back(orphan);
  }
  for (auto const& [key, state] : by_key_) {
    if (!state->dirty.load(std::memory_order_acquire)) {
      continue;
    }
    std::lock_guard const inner{state->lock_};
    if (belongs_to_thread(key)) {
      if (state->settled_ == nullptr) {
        continue;
      }
    } else {
      driver::in_context const there{state->context_};
      if (!there.entered() || !mark(*state)) {
        continue;
      }
    }
    markers.push_back({state->settled_, state->context_});
    marked.push_back(state);
    if (reset) {
      state->dirty.store(false, std::memory_order_release);
    }
  }
  return markers;
}

bool stream_registry::wait_idle(std::int64_t deadline_ns, bool reset) {
  std::shared_lock const guard{draining_};
  driver::beside_captures const safe;
  std::vector<stream_state*> marked;
  for (marker const& one : mark_all(reset, marked)) {
    driver::in_context const there{one.context};
    while (there.entered() && !driver::has_happened(one.event)) {
      if (monotonic_ns() >= deadline_ns) {
        for (stream_state* state : marked) {
          state->dirty.store(true, std::memory_order_release);
        }
        return false;
      }
      ::sched_yield();
    }
  }
  std::lock_guard const inner{known_};
  orphans_.remove_if([this](marker const& orphan) {
    driver::in_context const there{orphan.context};
    bool const done = !there.entered() || driver::has_happened(orphan.event);
    if (done) {
      return_event(orphan.context, orphan.event);
    }
    return done;
  });
  return true;
}

bool stream_registry::leaves_marker(stream_state& state) {
  if (belongs_to_thread(state.key_)) {
    return state.settled_ !=
           nullptr;  // the thread is ending: the driver may have forgotten it already
  }
  driver::beside_captures const safe;
  driver::in_context const there{state.context_};
  return there.entered() && mark(state);
}

void stream_registry::retire(table::iterator known, bool may_run_on) {
  stream_state& state = *known->second;
  std::lock_guard const guard{state.lock_};
  if (may_run_on && state.dirty.load(std::memory_order_acquire) && leaves_marker(state)) {
    orphans_.push_back({std::exchange(state.settled_, nullptr), state.context_});
  }
  if (state.settled_ != nullptr) {
    return_event(state.context_, std::exchange(state.settled_, nullptr));
  }
  for (CUevent event : std::exchange(state.outstanding_, {})) {
    return_event(state.context_, event);
  }
  state.since_event_ = 0;
  state.dirty.store(false, std::memory_order_release);
  unused_.push_back(&state);
  by_key_.erase(known);
  epoch_.fetch_add(1, std::memory_order_acq_rel);
}

void stream_registry::forget_stream(CUstream stream) {
  std::lock_guard const guard{known_};
  if (auto const known = by_key_.find({stream, nullptr, nullptr}); known != by_key_.end()) {
    retire(known, true);
  }
}

void stream_registry::forget_if(bool (*matches)(stream_state const&, void const*), void const* what,
                                bool may_run_on) {
  std::lock_guard const guard{known_};
  for (auto known = by_key_.begin(); known != by_key_.end();) {
    auto const one = known++;
    if (matches(*one->second, what)) {
      retire(one, may_run_on);
    }
  }
}

void stream_registry::forget_thread(thread_slot const* owner) {
  forget_if([](stream_state const& state, void const* what) { return state.key_.owner == what; },
            owner, true);
}

void stream_registry::forget_context(CUcontext context) {
  std::unique_lock const guard{draining_};
  forget_if([](stream_state const& state, void const* what) { return state.context_ == what; },
            context, false);
  {
    std::lock_guard const inner{known_};
    orphans_.remove_if([context](marker const& orphan) { return orphan.context == context; });
  }
  std::lock_guard const inner{events_};
  spare_events_.erase(context);
}

void stream_registry::forget_device(int device) {
  std::vector<CUcontext> contexts;
  {
    std::lock_guard const guard{known_};
    for (auto const& [key, state] : by_key_) {
      if (state->device_ == device) {
        contexts.push_back(state->context_);
      }
    }
  }
  for (CUcontext context : contexts) {
    forget_context(context);
  }
}

}  // namespace sluice::gate
