/// The streams that work has been launched on: how much of it is outstanding, and when all of it is
/// done.
///
///   unknown ──a gated call──► clean/dirty ──destroyed, or its context──► unknown
///                                │    ▲
///                   gated call   ▼    │  an event recorded after the last call has happened
///                              dirty ─┘
///
/// *Window*: every `launches` gated calls an event is recorded on the stream; when `groups` of them
/// are outstanding, the next call has to wait until the oldest has happened. *Idle*: the control
/// thread records one event per dirty stream and polls. A stream that is being captured is left
/// alone in both. The per-thread default stream cannot be named by another thread, so each call on
/// it leaves an event of its own.
///
/// Thread-safety: all functions may be called from any thread; none blocks on the device except
/// `wait_idle`.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "runtime/gate/driver.hpp"
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

struct window_bounds {
  unsigned launches = 0;  ///< gated calls between two events; 0: no bound
  unsigned groups = 0;    ///< events outstanding at most
};

class stream_state {
 public:
  std::atomic<bool> dirty{false};

 private:
  friend class stream_registry;
  std::mutex lock_;  // guards the rest
  stream_key key_;
  CUcontext context_ = nullptr;
  int device_ = -1;
  unsigned since_event_ = 0;
  std::deque<CUevent> outstanding_;
  CUevent settled_ = nullptr;  // recorded after the last call, for waiting until idle
};

class stream_registry {
 public:
  /// The state of the stream that a call of the current thread uses; nullptr without a current
  /// context.
  [[nodiscard]] stream_state* find(thread_slot& self, stream_use use);

  /// Whether the stream has room in the window.
  [[nodiscard]] bool within(thread_slot& self, stream_use use, window_bounds bounds);
  /// Stops waiting for what is outstanding on the stream.
  void forgive(thread_slot& self, stream_use use);
  /// Notes a call that the driver has just taken.
  void launched(stream_state& state, window_bounds bounds);

  /// Waits until all work launched before the call is done. `reset` makes the streams clean; only a
  /// caller that knows that nobody launches meanwhile may ask for it. False if the deadline
  /// (CLOCK_MONOTONIC) passed first.
  [[nodiscard]] bool wait_idle(std::int64_t deadline_ns, bool reset);

  /// To be called before the driver destroys them. Work still running on them is waited for by
  /// `wait_idle`.
  void forget_stream(CUstream stream);
  void forget_context(CUcontext context);
  void forget_device(int device);
  void forget_thread(thread_slot const* owner);

 private:
  struct marker {
    CUevent event;
    CUcontext context;
  };
  struct hash {
    std::size_t operator()(stream_key const& key) const noexcept;
  };
  using table = std::unordered_map<stream_key, stream_state*, hash>;

  [[nodiscard]] stream_state* look_up(stream_key const& key);
  [[nodiscard]] CUevent take_event(CUcontext context);
  void return_event(CUcontext context, CUevent event);
  /// Records an event after the last call on the stream; false if the stream cannot tell when it is
  /// done.
  [[nodiscard]] bool mark(stream_state& state);
  [[nodiscard]] std::vector<marker> mark_all(bool reset, std::vector<stream_state*>& marked);
  /// Whether `settled_` tells when the last work of a stream that is about to be forgotten is done.
  [[nodiscard]] bool leaves_marker(stream_state& state);
  void retire(table::iterator known, bool may_run_on);
  void forget_if(bool (*matches)(stream_state const&, void const*), void const* what,
                 bool may_run_on);

  // Order of locks: draining_, known_, a state's lock, events_.
  std::shared_mutex draining_;  // shared by those who poll events, exclusive for who ends a context
  std::mutex known_;            // guards the next five
  table by_key_;
  std::deque<stream_state> states_;  // never shrinks: threads remember pointers
  std::vector<stream_state*> unused_;
  std::list<marker> orphans_;            // last events of destroyed streams
  std::atomic<std::uint64_t> epoch_{1};  // grows when something is forgotten
  std::mutex events_;                    // guards spare_events_
  std::unordered_map<CUcontext, std::vector<CUevent>> spare_events_;
};

/// The process's one registry; never destroyed.
[[nodiscard]] stream_registry& streams();

}  // namespace sluice::gate
