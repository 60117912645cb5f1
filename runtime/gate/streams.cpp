#include "runtime/gate/streams.hpp"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {

using std::chrono::nanoseconds;

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

/// How often a kind of work is measured before its mean is believed, and then one launch in so many
/// (a prime, so that it does not keep step with the layers of a model).
constexpr std::uint32_t enough_measurements = 4;
constexpr std::uint32_t measure_every = 257;
/// The same behind the same launches.
constexpr std::uint32_t enough_in_context = 2;
/// A stream whose launches come in ever new orders is not measured for ever.
constexpr std::uint32_t most_unknown_contexts = 16'384;

/// What is not measured yet is taken to be long, so that little of it is outstanding at once.
constexpr nanoseconds predicted(durations::estimate const& known, nanoseconds bound) {
  return known.measured > 0 ? known.mean : bound / 4;
}

/// Work between two events. One costs the device 2–3 µs, and over so much work the prediction is wrong
/// by 10–25 µs.
constexpr nanoseconds spacing{1'000'000};

/// A unit that is longer than this, and than the bound, has an event before and behind it.
constexpr nanoseconds shortest_marked{250'000};

work_key in_context(recent_kinds const& before, work_key kind) {
  return key_of_work({before[0], before[1], before[2], before[3], kind});
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

bool stream_registry::has_room(thread_slot& self, planned_work const& work, nanoseconds bound) {
  stream_state* state = find(self, work.stream);
  if (state == nullptr) {
    return true;
  }
  std::lock_guard const guard{state->lock_};
  nanoseconds const takes = predicted(know(*state, work.kind), bound);
  std::int64_t const now = monotonic_ns();
  if (state->ahead_.should_ask(now, takes, bound)) {
    look(*state, now, takes, bound);
  }
  if (!state->ahead_.has_room(now, takes, bound)) {
    return false;
  }
  state->measure_next_ = is_to_be_measured(*state, work.kind);
  bool const stands_alone = state->measure_next_ || is_marked_unit(takes, bound);
  bool const follows_marker = state->ahead_.ends_with_marker() && state->ahead_.end() > now;
  // What is measured gets an event of its own, now: the device may have done all before it, and be
  // waiting.
  if (state->measure_next_ || (stands_alone && !follows_marker)) {
    put_marker(*state, {.timed = state->measure_next_});
  }
  return true;
}

bool stream_registry::is_marked_unit(nanoseconds takes, nanoseconds bound) const {
  nanoseconds const wanted{marked_units_ns_.load(std::memory_order_relaxed)};
  return takes >= (wanted > nanoseconds::zero() ? wanted : std::max(bound, shortest_marked));
}

durations::estimate stream_registry::know(stream_state const& state, work_key kind) const {
  durations::estimate const here = in_context_.of(in_context(state.before_, kind));
  return here.measured > 0 ? here : durations_.of(kind);
}

nanoseconds stream_registry::expected(work_key kind) const {
  durations::estimate const known = durations_.of(kind);
  return known.measured > 0 ? known.mean : nanoseconds::max() / 2;
}

bool stream_registry::is_to_be_measured(stream_state& state, work_key kind) const {
  work_key const here = in_context(state.before_, kind);
  bool const known = in_context_.of(here).measured >= enough_in_context;
  if (known) {
    state.unknown_contexts_ -= state.unknown_contexts_ > 0 ? 1 : 0;
  } else if (state.unknown_contexts_ < most_unknown_contexts) {
    ++state.unknown_contexts_;
  }
  bool const orders_recur = state.unknown_contexts_ < most_unknown_contexts;
  bool const due = ++state.launches_ % measure_every == 0;
  return due || (!known && orders_recur && in_context_.has_place(here)) ||
         (durations_.of(kind).measured < enough_measurements && durations_.has_place(kind));
}

void stream_registry::look(stream_state& state, std::int64_t now, nanoseconds takes,
                           nanoseconds bound) {
  driver::beside_captures const safe;
  while (state.ahead_.should_ask(now, takes, bound) && take_news(state, now)) {
  }
}

/// Asks for the oldest event between launches; false if it has not happened yet.
bool stream_registry::take_news(stream_state& state, std::int64_t now) {
  if (!driver::has_completed(static_cast<CUevent>(state.ahead_.oldest()->event))) {
    state.ahead_.is_late(now);
    return false;
  }
  group_marker const done = state.ahead_.completed(now);
  if (done.measures != 0 && state.passed_.timed) {
    if (auto const took = driver::elapsed(static_cast<CUevent>(state.passed_.event),
                                          static_cast<CUevent>(done.event))) {
      durations_.learn(done.measures, *took);
      in_context_.learn(done.in_context, *took);
    }
  }
  return_event(state.context_, std::exchange(state.passed_, done));
  return true;
}

void stream_registry::forgive(thread_slot& self, stream_use use) {
  if (stream_state* state = find(self, use); state != nullptr) {
    std::lock_guard const guard{state->lock_};
    forget_markers(*state);
  }
}

void stream_registry::forget_markers(stream_state& state) noexcept {
  while (auto const outstanding = state.ahead_.clear()) {
    return_event(state.context_, *outstanding);
  }
  return_event(state.context_, std::exchange(state.passed_, {}));
}

void stream_registry::launched(stream_state& state, planned_work const& work, nanoseconds bound) {
  bool const bounded = bound > nanoseconds::zero();
  if (!bounded && !belongs_to_thread(state.key_)) {
    return;
  }
  std::lock_guard const guard{state.lock_};
  if (belongs_to_thread(state.key_)) {
    driver::beside_captures const safe;
    // Whether it worked does not matter: a stream in capture has nothing running that could be
    // waited for.
    static_cast<void>(mark(state));
  }
  if (!bounded) {
    return;
  }
  durations::estimate const known = know(state, work.kind);
  nanoseconds const takes = predicted(known, bound);
  if (known.measured >= enough_in_context && takes > bound) {
    long_units_.note(work.name, takes);
  }
  state.ahead_.launched(monotonic_ns(), takes);
  group_marker behind;
  behind.timed = std::exchange(state.measure_next_, false);
  if (behind.timed && state.ahead_.is_alone()) {
    behind.measures = work.kind;
    behind.in_context = in_context(state.before_, work.kind);
  }
  std::shift_left(state.before_.begin(), state.before_.end(), 1);
  state.before_.back() = work.kind;
  if (behind.timed || is_marked_unit(takes, bound) || state.ahead_.unmarked_work() >= spacing) {
    put_marker(state, behind);
  }
}

void stream_registry::put_marker(stream_state& state, group_marker how) {
  driver::beside_captures const safe;
  auto* const stream = static_cast<CUstream>(state.key_.handle);
  CUevent const event =
      driver::takes_events(stream) ? take_event(state.context_, how.timed) : nullptr;
  how.event = event;
  if (event != nullptr && driver::record(event, stream)) {
    state.ahead_.marked(monotonic_ns(), how);
    return;
  }
  return_event(state.context_, how);
  state.ahead_.forget_unmarked(monotonic_ns());
}

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
      if (belongs_to_thread(key) ? state->drained_ == nullptr : !there.entered() || !mark(*state)) {
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

bool stream_registry::leaves_marker(stream_state& state) {
  if (belongs_to_thread(state.key_)) {
    return state.drained_ !=
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
