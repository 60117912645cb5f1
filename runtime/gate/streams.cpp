/// Which streams are known, and what is forgotten with a stream, a thread, a context.
#include "runtime/gate/streams.hpp"

#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "runtime/gate/driver_calls.hpp"

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
  if (auto const found = by_key_.find(key); found != by_key_.end()) {
    return found->second;
  }
  if (unused_.empty()) {
    unused_.reserve(states_.size() + 1);  // so that `retire` has room for all of them
    unused_.push_back(&states_.emplace_back());
  }
  stream_state* const state = unused_.back();
  by_key_.emplace(key, state);
  unused_.pop_back();
  std::lock_guard const inner{state->lock_};
  state->key_ = key;
  state->context_ = context;
  state->device_ = driver::current_device();
  return state;
}

CUevent stream_registry::take_event(CUcontext context, bool timed) {
  {
    std::lock_guard const guard{events_};
    std::vector<CUevent>& spare = spare_events_[context][timed ? 1 : 0];
    if (!spare.empty()) {
      CUevent event = spare.back();
      spare.pop_back();
      return event;
    }
  }
  return driver::create_event(timed);
}

void stream_registry::return_event(CUcontext context, CUevent event, bool timed) noexcept {
  try {
    std::lock_guard const guard{events_};
    spare_events_[context][timed ? 1 : 0].push_back(event);
  } catch (std::bad_alloc const&) {
    driver::destroy(event);
  }
}

void stream_registry::return_event(CUcontext context, group_marker const& of) noexcept {
  if (of.event != nullptr) {
    return_event(context, static_cast<CUevent>(of.event), of.timed);
  }
}

void stream_registry::retire(table::iterator known, bool may_run_on) {
  stream_state& state = *known->second;
  std::lock_guard const guard{state.lock_};
  if (may_run_on && state.dirty.load(std::memory_order_acquire) && leaves_marker(state)) {
    orphans_.push_back({state.drained_, state.context_});
    state.drained_ = nullptr;
  }
  if (state.drained_ != nullptr) {
    return_event(state.context_, std::exchange(state.drained_, nullptr));
  }
  forget_markers(state);
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

void stream_registry::forget_context(CUcontext context, bool alive) {
  std::unique_lock const guard{draining_};
  forget_if([](stream_state const& state, void const* what) { return state.context_ == what; },
            context, false);
  {
    std::lock_guard const inner{known_};
    orphans_.remove_if([this, context](marker const& orphan) {
      bool const goes = orphan.context == context;
      if (goes) {
        return_event(context, orphan.event);
      }
      return goes;
    });
  }
  spares unused;
  {
    std::lock_guard const inner{events_};
    unused = std::exchange(spare_events_[context], {});
    spare_events_.erase(context);
  }
  if (!alive) {
    return;
  }
  driver::in_context const there{context};
  for (auto const& kind : unused) {
    for (CUevent event : kind) {
      driver::destroy(event);
    }
  }
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
    forget_context(context, false);
  }
}

}  // namespace sluice::gate
