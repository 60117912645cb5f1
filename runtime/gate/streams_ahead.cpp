/// Run-ahead: what is predicted of the work on a stream, and the events by which it is measured.
#include "runtime/gate/streams.hpp"

#include <algorithm>
#include <utility>

#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {

using std::chrono::nanoseconds;

namespace {

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

bool stream_registry::has_room(thread_slot& self, planned_work const& work, nanoseconds bound,
                               nanoseconds longest) {
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
  if (takes > longest || !state->ahead_.has_room(now, takes, bound)) {
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
  if (!bounded && !state.key_.belongs_to_thread()) {
    return;
  }
  std::lock_guard const guard{state.lock_};
  if (state.key_.belongs_to_thread()) {
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

}  // namespace sluice::gate
