#include "runtime/gate/gate.hpp"

#include <immintrin.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <ctime>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/futex.hpp"
#include "runtime/gate/launch_watch.hpp"
#include "runtime/gate/submissions.hpp"

extern "C" {
constinit std::atomic<std::uint32_t> sluice_gate_defers [[gnu::visibility("hidden")]]{0};
[[gnu::visibility("hidden")]] void sluice_flush_submissions(std::uint32_t symbol_index) {
  sluice::gate::flush_submissions(static_cast<sluice::gate::symbol>(symbol_index));
}
}

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// How long a held thread sleeps at most before it looks again. The pause word changes without a
/// wake-up.
constexpr std::chrono::nanoseconds nap = 50us;
constexpr std::chrono::nanoseconds nap_until_woken = 5ms;
/// Waking a sleeping thread costs 35–44 µs at the median, so a short hold is waited out awake.
constexpr std::chrono::nanoseconds awake = 20us;
/// The end of a compute pause wakes nobody, and the device is idle until somebody sees it. Most last as
/// long as a request.
constexpr std::chrono::nanoseconds awake_in_pause = 3ms;
/// A thread that waits longer than this for its run-ahead may itself be the one that has to launch
/// what the device waits for, so it goes on.
constexpr std::chrono::nanoseconds room_patience = 1s;
/// A demand that the control thread has not answered by then is none of the launching threads'
/// business.
constexpr std::chrono::nanoseconds demand_patience = 2s;
/// Of the bound, while a launch of another process is announced.
constexpr int announced_part = 3;

void sleep_at_most(std::chrono::nanoseconds span) {
  timespec const limit = to_timespec(span);
  ::nanosleep(&limit, nullptr);
}

bool membarrier(int command) {
  return ::syscall(SYS_membarrier, command, 0, 0) == 0;
}

thread_local constinit bool preparing_here [[gnu::tls_model("initial-exec")]] = false;

}  // namespace

constinit gate process_gate;

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void gate::in_forked_child() {
  process_gate.become_inert();
}

void gate::become_inert() noexcept {
  mode_.store(mode::inert, std::memory_order_release);
  sluice_gate_defers.store(0, std::memory_order_relaxed);
}

void gate::prepare() {
  if ((mode_.load(std::memory_order_acquire) & mode::unprepared) == 0 || preparing_here) {
    return;
  }
  std::lock_guard const guard{preparing_};
  if ((mode_.load(std::memory_order_acquire) & mode::unprepared) == 0) {
    return;
  }
  preparing_here = true;  // the driver's own start-up code may come back here
  open_driver();
  preparing_here = false;
  std::uint32_t wanted = 0;
  if (!membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)) {
    wanted |= mode::fenced;
  }
  if (char const* run = std::getenv("SLUICE_RUN");
      run != nullptr && *run != '\0' && driver_is_open()) {
    wanted |= mode::unattached;
  }
  ::pthread_atfork(nullptr, nullptr, &gate::in_forked_child);
  change(wanted, mode::unprepared);
}

CUresult gate::enter_slowly(thread_slot& self, planned_work const& work) {
  bool attach_failed = false;
  bool spun = false;
  std::int64_t waiting_since = 0;
  std::int64_t held_since = 0;
  std::int64_t asleep_from = 0;
  for (;;) {
    std::uint32_t const now = step_in(self);
    verdict what = judge(now, self, attach_failed);
    if (what == verdict::enter && (now & mode::bounded) != 0 && (now & mode::inert) == 0) {
      if (has_room(self, work)) {
        return CUDA_SUCCESS;
      }
      what = verdict::wait_for_room;
    }
    if (what == verdict::enter) {
      return CUDA_SUCCESS;
    }
    leave(self);
    if (what == verdict::refuse) {
      return CUDA_ERROR_NOT_PERMITTED;
    }
    if (what == verdict::attach) {
      prepare();
      attach_failed = !attach_if_due();
    } else if (what == verdict::begin) {
      the_launch_watch().something_begins();
    } else if (what == verdict::wait_for_room) {
      std::int64_t const time = monotonic_ns();
      waiting_since = waiting_since == 0 ? time : waiting_since;
      if (time - waiting_since > room_patience.count()) {
        streams().forgive(self, work.stream);
      }
      ::sched_yield();
    } else if (what != verdict::wait_for_pause || !sees_pause_end(now, asleep_from)) {
      if (what == verdict::wait_for_change) {
        want_if_parked(now, work.name.call, held_since);
      }
      await_change(now, spun, what == verdict::wait_for_pause ? nap : nap_until_woken);
    }
  }
}

/// Waits awake until no compute pause holds the thread, for a while: `asleep_from`, 0 at first, is when
/// that is over.
bool gate::sees_pause_end(std::uint32_t seen, std::int64_t& asleep_from) const {
  if (!pause_holds()) {
    return false;  // it is something else that holds it
  }
  std::int64_t now = monotonic_ns();
  asleep_from = asleep_from == 0 ? now + awake_in_pause.count() : asleep_from;
  for (; now < asleep_from; now = monotonic_ns()) {
    if (mode_.load(std::memory_order_relaxed) != seen || !pause_holds()) {
      return true;
    }
    ::sched_yield();
  }
  return false;
}

/// Makes the thread seen inside, then looks at the mode.
std::uint32_t gate::step_in(thread_slot& self, std::uint32_t to) const {
  self.inside.store(to, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::uint32_t const now = mode_.load(std::memory_order_acquire);
  if ((now & mode::fenced) == 0) {
    return now;
  }
  self.inside.exchange(to, std::memory_order_seq_cst);
  return mode_.load(std::memory_order_seq_cst);
}

/// `since_ns`: when the calling thread began to wait for what is parked; 0 at first.
void gate::want_if_parked(std::uint32_t now, symbol held_in, std::int64_t& since_ns) {
  if ((now & mode::parked) != 0) {
    since_ns = since_ns == 0 ? monotonic_ns() : since_ns;
    want_launch(held_in, since_ns);
  }
}

void gate::enter_to_ask(thread_slot& self, symbol which) {
  bool spun = false;
  std::int64_t held_since = 0;
  for (;;) {
    std::uint32_t const now = step_in(self, stay::asking);
    if ((now & mode::closed) == 0 || (now & mode::inert) != 0) {
      return;
    }
    leave(self);
    want_if_parked(now, which, held_since);
    await_change(now, spun, nap_until_woken);
  }
}

bool gate::try_enter(thread_slot& self, planned_work const& work) {
  std::uint32_t const now = step_in(self);
  if (judge(now, self, false) == verdict::enter &&
      ((now & mode::bounded) == 0 || has_room(self, work))) {
    return true;
  }
  leave(self);
  return false;
}

gate::verdict gate::judge(std::uint32_t now, thread_slot const& self, bool attach_failed) {
  if ((now & mode::inert) != 0) {
    return verdict::enter;
  }
  if ((now & mode::unprepared) != 0 || ((now & mode::unattached) != 0 && !attach_failed)) {
    return verdict::attach;
  }
  if ((now & mode::closed) != 0) {
    return verdict::wait_for_change;
  }
  if ((now & mode::aborting) != 0 && self.expendable) {
    return verdict::refuse;
  }
  if ((now & mode::resting) != 0) {
    return verdict::begin;
  }
  if ((now & mode::urgent) != 0) {
    return verdict::enter;  // what the commit waits for may be any thread's
  }
  if ((now & mode::watching) != 0 && !self.protect && demand_holds()) {
    return verdict::wait_for_pause;
  }
  if ((now & mode::paused) != 0 && pause_holds()) {
    return verdict::wait_for_pause;
  }
  return verdict::enter;
}

bool gate::demand_holds() {
  std::uint64_t const demand = read(demand_word_);
  if (!wants_chunks(demand) || demand == answered_.load(std::memory_order_acquire)) {
    return false;
  }
  std::int64_t const now = monotonic_ns();
  if (seen_.load(std::memory_order_acquire) != demand) {
    seen_ns_.store(now, std::memory_order_release);
    seen_.store(demand, std::memory_order_release);
  }
  return now - seen_ns_.load(std::memory_order_acquire) < demand_patience.count();
}

namespace {

/// Whether the instant that stands in a word has not come yet.
bool lies_ahead(std::uint64_t until_ns) {
  return until_ns != 0 && static_cast<std::uint64_t>(monotonic_ns()) < until_ns;
}

}  // namespace

bool gate::pause_holds() const {
  return lies_ahead(read(pause_word_));
}

bool gate::has_room(thread_slot& self, planned_work const& work) const {
  auto const bound = run_ahead_bound();
  if (std::uint64_t const until = read(announcement_word_); lies_ahead(until)) {
    // What will have ended by then keeps nobody waiting.
    std::chrono::nanoseconds const left{static_cast<std::int64_t>(until) - monotonic_ns()};
    return streams().has_room(self, work, bound / announced_part, bound + left);
  }
  return streams().has_room(self, work, bound);
}

void gate::set_resting(bool on) {
  if (on) {
    change(mode::resting, 0);
    membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED);  // as in `close`
  } else {
    change(0, mode::resting);
  }
}

void gate::await_change(std::uint32_t seen, bool& spun, std::chrono::nanoseconds at_most) {
  if (!spun) {
    std::int64_t const end = monotonic_ns() + std::chrono::nanoseconds{awake}.count();
    while (mode_.load(std::memory_order_relaxed) == seen && monotonic_ns() < end) {
      _mm_pause();
    }
    spun = true;
    return;
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(mode_, seen, at_most);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void gate::change(std::uint32_t set, std::uint32_t clear) {
  std::uint32_t before = mode_.load(std::memory_order_relaxed);
  do {
    if ((before & mode::inert) != 0) {
      return;
    }
  } while (
      !mode_.compare_exchange_weak(before, (before & ~clear) | set, std::memory_order_seq_cst));
  wake_all();
}

void gate::wake_all() {
  if (sleepers_.load(std::memory_order_seq_cst) != 0) {
    futex_wake(mode_);
  }
}

int gate::close(std::int64_t deadline_ns) {
  return close_but_for(true, deadline_ns) ? 0 : ETIMEDOUT;
}

int gate::close_all(std::int64_t deadline_ns) {
  return close_but_for(false, deadline_ns) ? 0 : ETIMEDOUT;
}

/// False: the deadline has passed, and it is as it was.
bool gate::close_but_for(bool asking, std::int64_t deadline_ns) {
  prepare();
  if (inert()) {
    return true;
  }
  std::lock_guard const guard{control_};
  bool const was_closed = (mode_.load(std::memory_order_relaxed) & mode::closed) != 0;
  if (!was_closed) {
    change(mode::closed, 0);
    membarrier(
        MEMBARRIER_CMD_PRIVATE_EXPEDITED);  // where there is none, entering threads are `fenced`
    streams().watch_unit();
  }
  if ((was_closed || await_end_of(stay::launching, deadline_ns)) &&
      (asking || await_end_of(stay::asking, deadline_ns))) {
    return true;
  }
  if (!was_closed) {
    change(0, mode::closed);
  }
  return false;
}

bool gate::await_end_of(std::uint32_t what, std::int64_t deadline_ns) const {
  int tries = 0;
  for (thread_slot* slot = first_slot(); slot != nullptr; slot = slot->next) {
    // Once seen outside is enough: it cannot come in again before open().
    while (slot != current_slot && slot->inside.load(std::memory_order_seq_cst) == what) {
      if (monotonic_ns() >= deadline_ns) {
        return false;
      }
      if (++tries < 256) {
        _mm_pause();
        continue;
      }
      streams().poll_unit();
      sleep_at_most(10us);
    }
  }
  return true;
}

void gate::open() {
  if (inert()) {
    return;
  }
  std::lock_guard const guard{control_};
  change(0, mode::closed);
}

void gate::set_parked(bool on) {
  departures_.fetch_add(on ? 1 : 0, std::memory_order_acq_rel);  // before anything goes
  on ? change(mode::parked, 0) : change(0, mode::parked);
}

void gate::await_return(symbol which) {
  bool spun = false;
  std::int64_t held_since = 0;
  for (;;) {
    std::uint32_t const now = mode_.load(std::memory_order_acquire);
    if ((now & mode::parked) == 0 || (now & mode::inert) != 0) {
      return;
    }
    want_if_parked(now, which, held_since);
    await_change(now, spun, nap_until_woken);
  }
}

void gate::set_pause_word(std::uint64_t const volatile* until_ns) {
  prepare();
  pause_word_.store(until_ns != nullptr ? until_ns : &no_word, std::memory_order_release);
  until_ns != nullptr ? change(mode::paused, 0) : change(0, mode::paused);
}

void gate::set_demand_word(std::uint64_t const volatile* word) {
  prepare();
  std::uint64_t const volatile* const looked_at = word != nullptr ? word : &no_word;
  answered_.store(__atomic_load_n(looked_at, __ATOMIC_ACQUIRE), std::memory_order_release);
  demand_word_.store(looked_at, std::memory_order_release);
  word != nullptr ? change(mode::watching, 0) : change(0, mode::watching);
}

void gate::demand_answered(std::uint64_t demand) {
  answered_.store(demand, std::memory_order_release);
  wake_all();
}

std::int64_t gate::demand_seen_ns() const noexcept {
  bool const seen = seen_.load(std::memory_order_acquire) == read(demand_word_);
  return seen ? seen_ns_.load(std::memory_order_acquire) : 0;
}

void gate::set_aborting(bool on) {
  if (on) {
    change(mode::aborting, 0);
    return;
  }
  aborts_.fetch_add(1, std::memory_order_acq_rel);  // first: see `submission_queue::make`
  change(0, mode::aborting);
}

void gate::set_run_ahead(std::chrono::nanoseconds bound) {
  prepare();
  {
    std::lock_guard const guard{bounding_};
    run_ahead_ns_.store(bound.count(), std::memory_order_release);
    if (bound.count() > 0) {
      bool const leaves = defers();
      sluice_gate_defers.fetch_or(leaves ? 1 : 0, std::memory_order_release);
      change(mode::bounded | (leaves ? mode::deferring : 0), 0);
      return;
    }
    change(0, mode::bounded);
  }
  defer_no_longer();
}

bool gate::defer_for_others() {
  std::lock_guard const guard{bounding_};
  if (!defers()) {
    return false;
  }
  sluice_gate_defers.store(1, std::memory_order_release);
  change(mode::agreeing | mode::deferring, 0);
  return true;
}

void gate::defer_no_longer() {
  std::lock_guard const guard{bounding_};
  std::uint32_t const now = mode_.load(std::memory_order_acquire);
  if ((now & mode::deferring) == 0 || (now & mode::bounded) != 0 ||
      leavers_.load(std::memory_order_seq_cst) != 0) {
    return;
  }
  auto const go_straight = [](void* of) {
    static_cast<gate*>(of)->change(0, mode::agreeing | mode::deferring);
    sluice_gate_defers.store(0, std::memory_order_release);
  };
  if_none_is_left(go_straight, this);
}

}  // namespace sluice::gate
