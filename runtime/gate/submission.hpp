/// Deferred submission: calls that a thread of the gate's own makes, in the order in which they came.
///
/// A launching thread that had to wait for room on the device could not run ahead, and would show
/// each of its own hiccups to the device. So while run-ahead is bounded it leaves its calls here and
/// goes on; without a bound, too, behind a call that others have not agreed to yet:
///
///   launching threads ──push──► [ … | … | … ] ──submitter──► gate ──► driver
///                                   └── of an aborted micro-batch ──► dropped
///
/// One queue and one submitter for each context. The queue is the order of the calls, whatever their
/// streams: what was called first is submitted first, as without a queue. Only behind a call that
/// others have to agree to (`sluice_agreed_call`) some are held, and the rest goes on beside them:
///
///   held     [ agreed? | its stream's next | what waits for their events | … ]
///   beside   [ other streams' calls ]
///
/// What waits for the device, orders work in another way or asks for an answer *flushes* first: it
/// waits until all that was accepted before it has been made. The submitter passes the gate like any
/// thread, with the exemptions of the thread that made the call.
///
/// A commit can be left as well, before it is known whether the micro-batch keeps its memory: see
/// `queued_commit`.
///
/// Only calls are taken that the driver has accepted before in that form (`kind_of_call`), so that
/// what it refuses for its form is refused at once, in the call. Another error is kept, and is the
/// result of the next call that may have one; so are the errors of a kernel.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "abi/gate_api.h"
#include "runtime/gate/driver.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/thread_slot.hpp"

namespace sluice::gate {

/// The form of a call: what decides whether the driver accepts it.
using kind_of_call = work_key;
/// Of a call that is accepted in any form.
inline constexpr kind_of_call any_kind = 0;

enum class agreed_end;  // agreed_calls.hpp

/// A stream by one name: the legacy stream has two.
[[nodiscard]] inline void* name_of(stream_use where) noexcept {
  return where.handle == nullptr ? CU_STREAM_LEGACY : where.handle;
}
/// Whether two streams wait for each other, because one of them is the legacy stream.
[[nodiscard]] bool are_ordered(void* one, void* other) noexcept;

/// A call with its parameters by value.
struct deferred_call {
  planned_work work;
  bool enters = true;  ///< false: an event, or a step of a commit, which no closed gate holds
  bool protect = false;
  bool expendable = false;
  std::uint64_t aborts = 0;  ///< of the gate, when it was accepted
  bool agreed = false;       ///< the parameters are a `sluice_agreed_call`
  std::uint32_t commit = 0;  ///< that it belongs to
  CUevent event = nullptr;   ///< that it records or waits for
  CUresult (*make)(std::byte* parameters) = nullptr;
  std::unique_ptr<std::byte[]> parameters;
  std::size_t room = 0;  ///< bytes at `parameters`

  [[nodiscard]] std::byte* make_room(std::size_t bytes);
};

class submission_queue {
 public:
  /// Threads that are not interrupted leave so many calls behind at most.
  static constexpr std::size_t usual_length = 2048;

  explicit submission_queue(CUcontext context) noexcept : context_{context} {}
  ~submission_queue() = default;  // only of one that was never started
  submission_queue(submission_queue const&) = delete;
  submission_queue& operator=(submission_queue const&) = delete;

  /// Starts the submitter; false if there can be none.
  [[nodiscard]] bool start();
  [[nodiscard]] CUcontext context() const noexcept {
    return context_.load(std::memory_order_acquire);
  }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] std::uint64_t accepted() const noexcept {
    return accepted_.load(std::memory_order_relaxed);
  }
  /// Whether all that was accepted has been made.
  [[nodiscard]] bool is_empty() const noexcept {
    return made_.load(std::memory_order_acquire) == accepted_.load(std::memory_order_acquire);
  }

  /// The lock without which no call is taken, unless it holds any.
  [[nodiscard]] std::unique_lock<std::mutex> hold_if_empty() {
    std::unique_lock lock{mutex_};
    if (!is_empty()) {
      lock.unlock();
    }
    return lock;
  }

  /// Takes a call; `Call` is copied and called later. False if it cannot be taken: the driver has not
  /// accepted that kind before, or calls go straight by now. Waits while the queue is full.
  template <typename Call>
  [[nodiscard]] bool push(thread_slot const& self, planned_work const& work, kind_of_call kind,
                          Call const& call) {
    return push_copy(self, work, kind, call, {}) != 0;
  }
  /// The same for parameters of any length, which `fill` writes.
  template <typename Fill>
  [[nodiscard]] bool push(thread_slot const& self, planned_work const& work, kind_of_call kind,
                          std::size_t bytes, CUresult (*caller)(std::byte*), Fill const& fill) {
    return push(self, work, kind, bytes, caller, fill, {}) != 0;
  }
  /// Takes something that the submitter is to do beside the gate. Returns its number, 0 if it is not
  /// taken because calls go straight.
  template <typename Call>
  [[nodiscard]] std::uint64_t push_step(thread_slot const& self, Call const& call) {
    return push_copy(self, {}, any_kind, call, {nullptr, false, true});
  }
  /// Takes the decision on the commit. The submitter comes to it before it makes the last of what lies
  /// before it, so that whoever waits for the decision has heard of it when the device has done that.
  /// False if nothing lies in the queue, or calls go straight.
  [[nodiscard]] bool push_decision(thread_slot const& self);
  /// Takes a call that others have to agree to. False if calls go straight.
  [[nodiscard]] bool push_agreed(thread_slot const& self, sluice_agreed_call const& call);
  /// Takes the record of an event on a stream, or a stream's wait for one.
  template <typename Call>
  [[nodiscard]] bool push_event(thread_slot const& self, stream_use where, CUevent event,
                                bool records, Call const& call) {
    return push_copy(self, {where, 0}, any_kind, call, {event, records, true}) != 0;
  }
  /// Takes the end of an event, behind the calls that name it. False if none of those is left.
  template <typename Call>
  [[nodiscard]] bool push_end_of(thread_slot const& self, CUevent event, Call const& call) {
    event_use const last = last_use(event);
    return !has_been_made(last.used) && push_event(self, last.where, event, false, call);
  }

  /// The driver has accepted a call of that kind.
  void accept(kind_of_call kind);
  /// Functions have gone: their handles may come again for others.
  void forget_kinds();

  /// What it holds will not be made, and it takes no more: the submitter stays out of the driver (own_thread.hpp).
  void abandon();

  /// Waits until all that was accepted before has been made, or dropped.
  void flush() { static_cast<void>(flush_to(accepted_.load(std::memory_order_acquire), never_ns)); }
  /// The same up to the call of that number; false if the deadline (CLOCK_MONOTONIC) passes first.
  [[nodiscard]] bool flush_to(std::uint64_t number, std::int64_t deadline_ns) {
    return await(number, extent::all_before, false, deadline_ns);
  }
  /// The same up to the last record of that event, or the last call that names it, or up to the last use
  /// of the stream.
  void flush_record(CUevent event) { await(last_use(event).recorded, extent::itself); }
  void flush_stream(stream_use where);
  void flush_event(CUevent event) { await(last_use(event).used, extent::itself); }
  [[nodiscard]] bool record_is_pending(CUevent event) {
    return !has_been_made(last_use(event).recorded);
  }
  [[nodiscard]] bool uses_event(CUevent event) { return !has_been_made(last_use(event).used); }
  [[nodiscard]] bool uses_stream(stream_use where) { return !pending_calls_before(where).empty(); }

  /// The error of a call that was made later than it was accepted; CUDA_SUCCESS if there is none. It
  /// is told once.
  [[nodiscard]] CUresult take_error() noexcept {
    return error_.load(std::memory_order_relaxed) == CUDA_SUCCESS
               ? CUDA_SUCCESS
               : error_.exchange(CUDA_SUCCESS, std::memory_order_acq_rel);
  }

  /// Keeps an error for that, unless there is an earlier one.
  void keep_error(CUresult result) noexcept {
    CUresult none = CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
      error_.compare_exchange_strong(none, result, std::memory_order_acq_rel);
    }
  }

  /// Flushes and ends the submitter; the context is about to go.
  void end();

 private:
  /// An interrupted thread may leave a call beyond the usual length, so that it gets to its handler.
  static constexpr std::size_t capacity = 2 * usual_length;
  /// So many streams and events are remembered before those that are done with are forgotten.
  static constexpr std::size_t many = 1024;
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  static constexpr std::int64_t never_ns = std::numeric_limits<std::int64_t>::max();
  enum class extent { itself, all_before };

  struct event_use {
    std::uint64_t recorded = 0;  ///< number of the last record of it
    std::uint64_t used = 0;      ///< and of the last call that names it
    stream_use where{};          ///< of that
  };

  struct named_event {
    CUevent event = nullptr;  ///< that the call records or waits for
    bool records = false;
    bool beside_gate = false;  ///< the call puts no work on the device
    bool agreed = false;
  };

  template <typename Call>
  [[nodiscard]] std::uint64_t push_copy(thread_slot const& self, planned_work const& work,
                                        kind_of_call kind, Call const& call, named_event named) {
    static_assert(std::is_trivially_copyable_v<Call> && std::is_trivially_destructible_v<Call>);
    return push(
        self, work, kind, sizeof(Call),
        [](std::byte* at) { return (*reinterpret_cast<Call*>(at))(); },
        [&call](std::byte* at) { std::memcpy(at, static_cast<void const*>(&call), sizeof(Call)); },
        named);
  }
  /// The call's number, or 0.
  template <typename Fill>
  [[nodiscard]] std::uint64_t push(thread_slot const& self, planned_work const& work,
                                   kind_of_call kind, std::size_t bytes,
                                   CUresult (*caller)(std::byte*), Fill const& fill,
                                   named_event named, bool behind_others = false) {
    std::unique_lock lock{mutex_};
    deferred_call* const place = reserve(lock, kind);
    if (place == nullptr || (behind_others && is_empty())) {
      return 0;
    }
    fill(place->make_room(bytes));
    place->work = work;
    place->make = caller;
    return publish(*place, self, named);
  }
  [[nodiscard]] deferred_call* reserve(std::unique_lock<std::mutex>& lock, kind_of_call kind);
  std::uint64_t publish(deferred_call& place, thread_slot const& self, named_event named);
  /// Numbers of calls; 0, which has always been made, if nothing is known.
  [[nodiscard]] event_use last_use(CUevent event);
  /// The last calls that have still to be made on the stream, and on those that it is ordered with.
  [[nodiscard]] std::vector<std::uint64_t> pending_calls_before(stream_use where);
  /// Waits until the call of that number has been made, or all up to it; false if a signal came in
  /// between, or the deadline.
  bool await(std::uint64_t number, extent what, bool interruptible = false,
             std::int64_t deadline_ns = never_ns);
  [[nodiscard]] bool has_been_made(std::uint64_t number) const noexcept {
    return made_.load(std::memory_order_seq_cst) >= number ||
           ended_[number % capacity].load(std::memory_order_seq_cst) == number;
  }
  [[nodiscard]] bool have_been_made(std::uint64_t number, extent what) const noexcept {
    return what == extent::itself ? has_been_made(number)
                                  : made_.load(std::memory_order_seq_cst) >= number;
  }
  [[nodiscard]] std::uint64_t decided_from(std::uint64_t number) const;
  void run();
  [[nodiscard]] bool await_call();
  [[nodiscard]] deferred_call& call_of(std::uint64_t number) {
    return calls_[(number - 1) % capacity];
  }
  void take_exemptions(thread_slot& self, deferred_call const& call) const;
  [[nodiscard]] CUresult make(thread_slot& self, deferred_call& call);
  [[nodiscard]] bool is_dropped(deferred_call const& call) const;
  void end_with(std::uint64_t number, CUresult result);

  // held_calls.cpp
  void hold_behind(thread_slot& self, std::uint64_t number);
  [[nodiscard]] agreed_end come_to_terms(thread_slot& self);
  [[nodiscard]] bool take_one_beside(thread_slot& self);
  [[nodiscard]] bool make_beside(thread_slot& self, std::uint64_t number);
  void hold(std::uint64_t number);
  [[nodiscard]] bool comes_behind_held(deferred_call const& call) const;

  std::atomic<CUcontext> context_;
  int device_ = -1;  ///< the driver's ordinal
  pthread_t submitter_{};
  std::atomic<std::uint64_t> accepted_{0};
  std::atomic<std::uint64_t> made_{0};
  std::atomic<std::uint32_t> came_{0};    // grows to wake the submitter
  std::atomic<std::uint32_t> asleep_{0};  // 1 while the submitter sleeps
  std::atomic<std::uint32_t> went_{0};    // grows to wake who waits in `await`
  std::atomic<std::uint64_t> wake_at_{never};
  std::atomic<bool> ending_{false};
  std::atomic<CUresult> error_{CUDA_SUCCESS};
  std::atomic<std::uint64_t> decide_at_{never};  // the call that the decision comes before
  // By place, the last that has been made.
  std::array<std::atomic<std::uint64_t>, capacity> ended_{};

  // The submitter's alone:
  std::uint64_t taken_ = 0;     // the last call that it has made or held
  std::int64_t agreed_ns_ = 0;  // when it held the last one that others have to agree to
  // In their order; their places are not used again before they end.
  std::deque<std::uint64_t> held_;
  std::unordered_set<void*> held_streams_;  // that those have used since there were none
  std::unordered_set<CUevent> held_events_;

  std::mutex mutex_;  // guards the rest; a call belongs to the submitter once accepted
  std::unique_ptr<deferred_call[]> calls_;
  std::unordered_set<kind_of_call> kinds_;
  std::unordered_map<CUevent, event_use> events_;
  std::unordered_map<void*, std::uint64_t> streams_;  // number of the last call on it
  std::size_t forget_at_ = many;
  bool abandoned_ = false;
};

}  // namespace sluice::gate
