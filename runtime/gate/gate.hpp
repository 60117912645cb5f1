/// The gate: every call that puts work on the device enters here, and leaves when the driver has
/// taken the work.
///
/// A thread:   outside ──enter──► inside ──the driver's call──► outside
///                │                 ▲
///                └──► held ────────┘   closed, compute pause, or its share of the run-ahead is used
///                       │              up; a held thread counts as outside
///                       └──► refused   aborting, and the thread expendable:
///                                      CUDA_ERROR_NOT_PERMITTED, or dropped (see dispatch.hpp),
///                                      and the driver is not called
///
/// The gate:   open ──close()──► closing ──nobody inside──► closed ──open()──► open
///                                  └──deadline──► open
///
/// `mode_` holds all of this in one word, and an open gate that has nothing to watch is the value
/// 0. Entering writes the thread's own slot and reads `mode_` without a barrier between them;
/// closing writes `mode_`, then has the kernel run a barrier on every thread of the process
/// (membarrier(2), PRIVATE_EXPEDITED), then waits for every slot. So either the closing thread sees
/// the thread inside, or the thread sees the gate closed. Where the kernel refuses membarrier, the
/// `fenced` bit stays set and each entering thread pays for a barrier of its own.
///
/// Exempt threads do not take part: they are never held, never refused and never waited for. A
/// child of fork() of a process that used CUDA takes no part either: CUDA does not work there, and
/// nobody would open a closed gate.
///
/// Thread-safety: everything may be called from any thread. Nothing throws. Waiting threads hold no
/// lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/thread_slot.hpp"

namespace sluice::gate {

/// Bits of the gate's mode.
namespace mode {
inline constexpr std::uint32_t unprepared = 1U << 0;  ///< the driver has not been opened
/// Under `sluice run`, the runtime library not yet asked.
inline constexpr std::uint32_t unattached = 1U << 1;
inline constexpr std::uint32_t closed = 1U << 2;
inline constexpr std::uint32_t aborting = 1U << 3;
inline constexpr std::uint32_t paused = 1U << 4;    ///< there is a pause word to look at
inline constexpr std::uint32_t urgent = 1U << 5;    ///< nobody is held by a pause or a demand
inline constexpr std::uint32_t bounded = 1U << 6;   ///< run-ahead is bounded
inline constexpr std::uint32_t fenced = 1U << 7;    ///< no membarrier on this kernel
inline constexpr std::uint32_t inert = 1U << 8;     ///< forked child
inline constexpr std::uint32_t watching = 1U << 9;  ///< there is a demand word to look at
/// Calls may be left to a submitter, and some may still lie there.
inline constexpr std::uint32_t deferring = 1U << 10;
inline constexpr std::uint32_t agreeing = 1U << 11;  ///< also without a bound
/// Launches are watched, and the device has done all that it was given (launch_watch.hpp).
inline constexpr std::uint32_t resting = 1U << 12;
/// Closed, and memory is not there: who is held wants it back.
inline constexpr std::uint32_t parked = 1U << 13;
}  // namespace mode

extern "C" {
/// Not 0 while `mode::deferring` may be set, for the stubs of `drains` (generate.py).
extern std::atomic<std::uint32_t> sluice_gate_defers;
/// What they then call.
void sluice_flush_submissions(std::uint32_t symbol_index);
}

/// What the gate looks at while it was given no word: it asks for nothing.
inline constexpr std::uint64_t no_word = 0;

class gate {
 public:
  constexpr gate() noexcept = default;
  ~gate() = default;
  gate(gate const&) = delete;
  gate& operator=(gate const&) = delete;

  /// Lets the calling thread inside, or holds it until it may enter. Anything but CUDA_SUCCESS
  /// refuses it: then it is outside and must not call the driver.
  [[nodiscard]] CUresult enter(thread_slot& self, planned_work const& work) {
    if (enter_if_it_holds_nobody(self)) [[likely]] {
      return CUDA_SUCCESS;
    }
    return enter_slowly(self, work);
  }
  void leave(thread_slot& self) noexcept {
    self.inside.store(stay::outside, std::memory_order_release);
  }
  /// Lets the calling thread inside if there is no reason to hold anybody, nor to leave a call to a submitter.
  /// Else it is outside.
  [[nodiscard]] bool enter_if_it_holds_nobody(thread_slot& self) {
    self.inside.store(stay::launching, std::memory_order_relaxed);
    // The other half is the membarrier in close().
    std::atomic_signal_fence(std::memory_order_seq_cst);
    bool const inside = holds_nobody();
    if (!inside) {
      leave(self);
    }
    return inside;
  }
  /// The same for a call that puts nothing on the device and names memory: only a closed gate holds it. `close` does
  /// not wait for it, `close_all` does.
  void enter_to_ask(thread_slot& self, symbol which);
  /// Lets the calling thread inside if it may enter at once. Else it is outside.
  [[nodiscard]] bool try_enter(thread_slot& self, planned_work const& work);
  /// Whether the calling thread, which is inside, would be held if it came now: then whoever closes
  /// waits for it, and it must not stay.
  [[nodiscard]] bool wants_out(thread_slot const& self) {
    std::uint32_t const now = mode_.load(std::memory_order_acquire);
    return now != 0 && judge(now, self, true) != verdict::enter;
  }

  /// Opens the driver and arms the gate; the first call into this library does it.
  void prepare();

  /// As in `sluice_gate_api`; deadlines are CLOCK_MONOTONIC nanoseconds, results 0 or ETIMEDOUT.
  [[nodiscard]] int close(std::int64_t deadline_ns);
  [[nodiscard]] int close_all(std::int64_t deadline_ns);
  void open();
  void set_parked(bool on);
  /// Memory is not there; how often it has gone; and waits until it is there, which it wants.
  [[nodiscard]] bool is_parked() const noexcept {
    return (mode_.load(std::memory_order_acquire) & mode::parked) != 0;
  }
  [[nodiscard]] std::uint32_t departures() const noexcept {
    return departures_.load(std::memory_order_acquire);
  }
  void await_return(symbol which);
  void set_aborting(bool on);
  void set_urgent(bool on) { on ? change(mode::urgent, 0) : change(0, mode::urgent); }
  /// The word must stay mapped for the life of the process: a thread may be about to read it.
  void set_pause_word(std::uint64_t const volatile* until_ns);
  /// As `sluice_gate_api` says of them; the word must stay mapped like the pause word.
  void set_demand_word(std::uint64_t const volatile* word);
  void demand_answered(std::uint64_t demand);
  [[nodiscard]] std::int64_t demand_seen_ns() const noexcept;
  /// At most so much predicted work lies before a call that is let in; 0: no bound.
  void set_run_ahead(std::chrono::nanoseconds bound);
  /// Whether a bounded thread leaves its calls to a submitter (submission.hpp) instead of waiting for
  /// room. Applies from the next `set_run_ahead` on, and to the next call that others have to agree to.
  void set_deferred(bool on) { defers_.store(on, std::memory_order_release); }
  [[nodiscard]] bool defers() const noexcept { return defers_.load(std::memory_order_acquire); }
  /// Has calls left to a submitter also while run-ahead is not bounded, behind one that others have to agree to.
  /// False if a thread is to wait itself. The submitter ends it.
  [[nodiscard]] bool defer_for_others();
  /// Lets calls go straight again if run-ahead is not bounded, or no longer, and nothing lies in a queue, nor is about to.
  void defer_no_longer();
  /// While one lives the calling thread is about to leave such a call.
  class leaver {
   public:
    explicit leaver(gate& at) noexcept : at_(at) {
      at_.leavers_.fetch_add(1, std::memory_order_seq_cst);
    }
    leaver(leaver const&) = delete;
    leaver& operator=(leaver const&) = delete;
    ~leaver() { at_.leavers_.fetch_sub(1, std::memory_order_release); }

   private:
    gate& at_;
  };

  [[nodiscard]] std::chrono::nanoseconds run_ahead_bound() const noexcept {
    return std::chrono::nanoseconds{run_ahead_ns_.load(std::memory_order_acquire)};
  }
  /// As `sluice_gate_api` says of it; the word must stay mapped like the pause word.
  void set_announcement_word(std::uint64_t const volatile* until_ns) {
    announcement_word_.store(until_ns != nullptr ? until_ns : &no_word, std::memory_order_release);
  }

  /// The device rests, or no longer: see launch_watch.hpp, whose alone this is. After resting has been set, each thread
  /// that enters is seen inside or sees it.
  void set_resting(bool on);
  [[nodiscard]] bool resting() const noexcept {
    return (mode_.load(std::memory_order_acquire) & mode::resting) != 0;
  }
  /// Whether calls have to be noted for the bound.
  [[nodiscard]] bool bounded() const noexcept {
    return (mode_.load(std::memory_order_relaxed) & mode::bounded) != 0;
  }
  /// Whether a submitter takes calls. Told without its queue's lock it may have changed before it is known.
  [[nodiscard]] bool leaves_calls() const noexcept {
    return (mode_.load(std::memory_order_relaxed) & (mode::bounded | mode::agreeing)) != 0;
  }
  /// Whether it takes them also where they could go straight.
  [[nodiscard]] bool leaves_all() const noexcept {
    return (mode_.load(std::memory_order_relaxed) & (mode::bounded | mode::agreeing)) ==
           mode::agreeing;
  }
  [[nodiscard]] bool inert() const noexcept {
    return (mode_.load(std::memory_order_relaxed) & mode::inert) != 0;
  }
  /// Whether a call may have to queue behind others, or to wait until they have been made.
  [[nodiscard]] bool deferring() const noexcept {
    return (mode_.load(std::memory_order_relaxed) & mode::deferring) != 0;
  }
  [[nodiscard]] bool aborting() const noexcept {
    return (mode_.load(std::memory_order_acquire) & mode::aborting) != 0;
  }
  /// How many aborts have ended.
  [[nodiscard]] std::uint64_t aborts() const noexcept {
    return aborts_.load(std::memory_order_acquire);
  }

  /// Runs `attach` if this process is under `sluice run` and has not attached yet; see attach.hpp.
  [[nodiscard]] bool unattached() const noexcept {
    return (mode_.load(std::memory_order_acquire) & (mode::unattached | mode::unprepared)) != 0;
  }
  void attached() { change(0, mode::unattached); }

 private:
  enum class verdict {
    enter,
    refuse,
    attach,
    wait_for_change,
    wait_for_pause,
    wait_for_room,
    begin
  };

  /// Whether it is open, and those who could ask for something ask for nothing.
  [[nodiscard]] bool holds_nobody() const noexcept {
    std::uint32_t const now = mode_.load(std::memory_order_acquire);
    return (now & ~(mode::paused | mode::watching)) == 0 && read(pause_word_) == 0 &&
           !wants_chunks(read(demand_word_));
  }
  [[nodiscard]] static std::uint64_t read(
      std::atomic<std::uint64_t const volatile*> const& word) noexcept {
    return __atomic_load_n(word.load(std::memory_order_acquire), __ATOMIC_ACQUIRE);
  }
  [[nodiscard]] static bool wants_chunks(std::uint64_t demand) noexcept {
    return static_cast<std::uint32_t>(demand) != 0;
  }

  [[nodiscard]] CUresult enter_slowly(thread_slot& self, planned_work const& work);
  [[nodiscard]] std::uint32_t step_in(thread_slot& self, std::uint32_t to = stay::launching) const;
  [[nodiscard]] verdict judge(std::uint32_t now, thread_slot const& self, bool attach_failed);
  [[nodiscard]] bool pause_holds() const;
  [[nodiscard]] bool has_room(thread_slot& self, planned_work const& work) const;
  [[nodiscard]] bool demand_holds();
  [[nodiscard]] bool close_but_for(bool asking, std::int64_t deadline_ns);
  [[nodiscard]] bool await_end_of(std::uint32_t what, std::int64_t deadline_ns) const;
  static void want_if_parked(std::uint32_t now, symbol held_in, std::int64_t& since_ns);
  void wake_all();
  /// Sets and clears bits and wakes whoever is held.
  void change(std::uint32_t set, std::uint32_t clear);
  /// Returns when the mode is no longer `seen`, or after a while; the first time it spins instead
  /// of sleeping.
  void await_change(std::uint32_t seen, bool& spun, std::chrono::nanoseconds at_most);
  [[nodiscard]] bool sees_pause_end(std::uint32_t seen, std::int64_t& asleep_from) const;
  void become_inert() noexcept;
  static void in_forked_child();

  std::atomic<std::uint32_t> mode_{mode::unprepared};
  std::atomic<std::uint32_t> sleepers_{0};  // threads that a change must wake
  std::atomic<std::uint64_t const volatile*> pause_word_{&no_word};
  std::atomic<std::uint64_t const volatile*> demand_word_{&no_word};
  std::atomic<std::uint64_t const volatile*> announcement_word_{&no_word};
  std::atomic<std::uint64_t> answered_{0};  // the last demand that needs nobody held any more
  std::atomic<std::uint64_t> seen_{0};      // the demand that a thread saw last, and when first
  std::atomic<std::int64_t> seen_ns_{0};
  std::atomic<std::int64_t> run_ahead_ns_{0};
  std::atomic<std::uint64_t> aborts_{0};
  std::atomic<bool> defers_{false};
  std::atomic<std::uint32_t> departures_{0};
  std::mutex bounding_;  // one who sets or lifts the bound at a time
  std::atomic<std::uint32_t> leavers_{0};
  std::mutex control_;  // one close() or open() at a time
  std::mutex preparing_;
};

extern gate process_gate [[gnu::visibility("hidden")]];
/// The process's one gate. Never destroyed: threads launch until the process is gone.
[[nodiscard]] inline gate& the_gate() noexcept {
  return process_gate;
}

/// CLOCK_MONOTONIC, in nanoseconds.
[[nodiscard]] std::int64_t monotonic_ns() noexcept;

}  // namespace sluice::gate
