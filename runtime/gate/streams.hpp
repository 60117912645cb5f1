/// The streams that work has been launched on: how much of it is outstanding, and when all of it is
/// done.
///
///   unknown ──a gated call──► clean/dirty ──destroyed, or its context──► unknown
///                                │    ▲
///                   gated call   ▼    │  an event recorded after the last call has happened
///                              dirty ─┘
///
/// *Run-ahead*: run_ahead.hpp predicts when a stream is done; a call that would find more than the
/// bound before it has to wait. *Idle*: the control thread records one event per dirty stream and
/// polls. A stream that is being captured is left alone in both. The per-thread default stream
/// cannot be named by another thread, so each call on it leaves an event of its own.
///
/// Thread-safety: all functions may be called from any thread; none blocks on the device except
/// `wait_idle`.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/durations.hpp"
#include "runtime/gate/long_units.hpp"
#include "runtime/gate/run_ahead.hpp"
#include "runtime/gate/thread_slot.hpp"

namespace sluice::gate {

/// The stream argument of a call, and whether null means the calling thread's default stream there.
struct stream_use {
  CUstream handle = nullptr;
  bool per_thread_default = false;
};

[[nodiscard]] inline bool is_per_thread(stream_use use) noexcept {
  return use.handle == CU_STREAM_PER_THREAD || (use.handle == nullptr && use.per_thread_default);
}

/// What a call puts on the device: where, and what kind of work it is.
struct planned_work {
  stream_use stream;
  work_key kind = 0;
  work_name name{};
};

/// What a launch is known as: layers of a model launch the same functions with the same dimensions for
/// work of different sizes, some of them behind the same small launches (batch normalisation's
/// statistics behind two). The oldest comes first.
using recent_kinds = std::array<work_key, 4>;

class stream_state {
 public:
  std::atomic<bool> dirty{false};

 private:
  friend class stream_registry;
  std::mutex lock_;  // guards the rest
  stream_key key_;
  CUcontext context_ = nullptr;
  int device_ = -1;
  run_ahead ahead_;
  group_marker passed_;  // of `ahead_`'s the last that has happened; without an event: none
  std::uint32_t launches_ = 0;
  bool measure_next_ = false;  // the next launch has an event before it and gets one behind it
  recent_kinds before_{};      // of the last launches
  std::uint32_t unknown_contexts_ = 0;  // that launches had of late, beyond those that were known
  CUevent drained_ = nullptr;           // recorded after the last call, for waiting until idle
};

class stream_registry {
 public:
  /// The state of the stream that a call of the current thread uses; nullptr without a current
  /// context.
  [[nodiscard]] stream_state* find(thread_slot& self, stream_use use);

  /// Whether the stream is predicted to be done within `bound`, so that a call of that kind may
  /// follow, if it does not take longer than `longest`.
  [[nodiscard]] bool has_room(thread_slot& self, planned_work const& work,
                              std::chrono::nanoseconds bound,
                              std::chrono::nanoseconds longest = std::chrono::nanoseconds::max());
  /// How long work of a kind takes on its own, as far as is known: what has not been measured is long.
  [[nodiscard]] std::chrono::nanoseconds expected(work_key kind) const;
  /// Stops waiting for what is outstanding on the stream.
  void forgive(thread_slot& self, stream_use use);
  /// Notes a call that the driver has just taken; `bound` 0: run-ahead is not bounded.
  void launched(stream_state& state, planned_work const& work, std::chrono::nanoseconds bound);
  /// What was launched and takes longer than the bound, the longest first.
  [[nodiscard]] std::optional<long_unit> longest_unit(std::size_t index) const {
    return long_units_.at(index);
  }

  /// Waits until all work launched before the call is done. `reset` makes the streams clean; only a
  /// caller that knows that nobody launches meanwhile may ask for it. False if the deadline
  /// (CLOCK_MONOTONIC) passed first. Throws std::bad_alloc; the streams are as dirty as they were then.
  [[nodiscard]] bool wait_idle(std::int64_t deadline_ns, bool reset);
  /// Whether all that was launched before is done. Streams that are being captured have nothing running.
  [[nodiscard]] bool are_idle();
  /// Nothing has been launched since that was so, and nobody launches meanwhile.
  void are_clean() noexcept;
  /// From now on `poll_unit`, which `wait_idle` calls as well, looks when the unit that is executing
  /// ends. For the control thread, which calls these and `wait_idle` one after the other.
  void watch_unit() noexcept;
  void poll_unit();
  /// Units that are longer get events around them, so that a pause can tell when one ended; 0: what is
  /// longer than the bound.
  void mark_units(std::chrono::nanoseconds longer_than) {
    marked_units_ns_.store(longer_than.count(), std::memory_order_relaxed);
  }
  /// When that unit ended (CLOCK_MONOTONIC); 0 if nothing was executing, or one of several short
  /// units that cannot be told apart.
  [[nodiscard]] std::int64_t unit_ended_ns() const noexcept {
    return unit_ended_ns_.load(std::memory_order_acquire);
  }

  /// To be called before the driver destroys them. Work still running on them is waited for by
  /// `wait_idle`.
  void forget_stream(CUstream stream);
  void forget_context(CUcontext context) { forget_context(context, true); }
  /// After its primary context has gone, and all its events with it.
  void forget_device(int device);
  void forget_thread(thread_slot const* owner);

 private:
  void forget_context(CUcontext context, bool alive);
  [[nodiscard]] bool is_marked_unit(std::chrono::nanoseconds takes,
                                    std::chrono::nanoseconds bound) const;

  struct marker {
    CUevent event;
    CUcontext context;
  };
  /// What the control thread waits for.
  struct watch_list {
    std::vector<marker> all;
    std::vector<stream_state*> streams;
  };
  struct hash {
    std::size_t operator()(stream_key const& key) const noexcept;
  };
  using table = std::unordered_map<stream_key, stream_state*, hash>;

  [[nodiscard]] stream_state* look_up(stream_key const& key);
  [[nodiscard]] CUevent take_event(CUcontext context, bool timed = false);
  void return_event(CUcontext context, CUevent event, bool timed = false) noexcept;
  void return_event(CUcontext context, group_marker const& of) noexcept;
  [[nodiscard]] bool take_news(stream_state& state, std::int64_t now);
  /// Takes the news of the stream's events, as far as it matters to a call that takes so long.
  void look(stream_state& state, std::int64_t now, std::chrono::nanoseconds takes,
            std::chrono::nanoseconds bound);
  /// What is known of a launch on the stream: behind the launches before it, else at all.
  [[nodiscard]] durations::estimate know(stream_state const& state, work_key kind) const;
  /// Whether a launch on the stream is to be measured.
  [[nodiscard]] bool is_to_be_measured(stream_state& state, work_key kind) const;
  /// Records an event between two launches: `how` says what it is for.
  void put_marker(stream_state& state, group_marker how);
  void forget_markers(stream_state& state) noexcept;
  /// Records an event after the last call on the stream; false if the stream cannot tell when it is
  /// done.
  [[nodiscard]] bool mark(stream_state& state);
  [[nodiscard]] watch_list mark_all(bool reset);
  static void make_dirty(watch_list const& watched) noexcept;
  [[nodiscard]] static bool has_completed(marker const& one);
  [[nodiscard]] static bool is_idle(stream_state const& state);
  /// Whether `drained_` tells when the last work of a stream that is about to be forgotten is done.
  [[nodiscard]] bool leaves_marker(stream_state& state);
  void retire(table::iterator known, bool may_run_on);
  void forget_if(bool (*matches)(stream_state const&, void const*), void const* what,
                 bool may_run_on);

  durations durations_;
  durations in_context_;  // of launches behind others
  long_units long_units_;
  std::mutex watching_;
  std::vector<marker> units_;  // events behind what executes; guarded by watching_
  std::atomic<std::int64_t> unit_ended_ns_{0};
  std::atomic<std::int64_t> marked_units_ns_{0};
  // Order of locks: draining_, watching_, known_, a state's lock, events_.
  std::shared_mutex draining_;  // shared by those who poll events, exclusive for who ends a context
  std::mutex known_;            // guards the next five
  table by_key_;
  std::deque<stream_state> states_;  // never shrinks: threads remember pointers
  std::vector<stream_state*> unused_;
  std::list<marker> orphans_;            // last events of destroyed streams
  std::atomic<std::uint64_t> epoch_{1};  // grows when something is forgotten
  std::mutex events_;                    // guards spare_events_
  /// Without times and with.
  using spares = std::array<std::vector<CUevent>, 2>;
  std::unordered_map<CUcontext, spares> spare_events_;
};

/// The process's one registry; never destroyed.
[[nodiscard]] stream_registry& streams();

}  // namespace sluice::gate
