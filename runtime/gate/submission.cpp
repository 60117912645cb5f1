#include "runtime/gate/submission.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/futex.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/queued_commit.hpp"
#include "runtime/gate/spinning.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// A lost wake-up would cost no more than this.
constexpr std::chrono::nanoseconds nap = 20ms;
/// A commit is decided with so much work to be made before it: about what Python needs from there to
/// the next launches. A demand that comes in this time waits for the commit.
constexpr std::chrono::nanoseconds decided_ahead = 600us;

/// A stream by one name: the legacy stream has two.
void* name_of(stream_use where) {
  return where.handle == nullptr ? CU_STREAM_LEGACY : where.handle;
}

}  // namespace

std::byte* deferred_call::make_room(std::size_t bytes) {
  if (room < bytes) {
    parameters = std::make_unique_for_overwrite<std::byte[]>(bytes);
    room = bytes;
  }
  return parameters.get();
}

bool submission_queue::start() {
  device_ = driver::current_device();
  calls_ = std::make_unique<deferred_call[]>(capacity);
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);  // signals are for the program's own threads
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  bool const started = ::pthread_create(
                           &submitter_, nullptr,
                           [](void* self) -> void* {
                             static_cast<submission_queue*>(self)->run();
                             return nullptr;
                           },
                           this) == 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) {
    ::pthread_setname_np(submitter_, "sluice-submit");
  }
  return started;
}

deferred_call* submission_queue::reserve(std::unique_lock<std::mutex>& lock, kind_of_call kind) {
  std::size_t length = usual_length;
  for (;;) {
    if (!the_gate().bounded() || (kind != any_kind && kinds_.count(kind) == 0)) {
      return nullptr;
    }
    std::uint64_t const next = accepted_.load(std::memory_order_relaxed);
    if (next - made_.load(std::memory_order_acquire) < length) {
      return &calls_[next % capacity];
    }
    lock.unlock();
    if (!await(next - length + 1, length == usual_length)) {
      length = capacity;
    }
    lock.lock();
  }
}

std::uint64_t submission_queue::publish(deferred_call& place, thread_slot const& self,
                                        named_event named) {
  place.enters = !named.beside_gate;
  place.commit = self.commit;
  place.protect = self.protect;
  place.expendable = self.expendable;
  place.aborts = the_gate().aborts();
  std::uint64_t const number = accepted_.load(std::memory_order_relaxed) + 1;
  if (streams_.size() + events_.size() >= forget_at_) {
    std::erase_if(streams_, [this](auto const& one) { return has_been_made(one.second); });
    std::erase_if(events_, [this](auto const& one) { return has_been_made(one.second.used); });
    forget_at_ = std::max(many, 2 * (streams_.size() + events_.size()));
  }
  streams_[name_of(place.work.stream)] = number;
  if (named.event != nullptr) {
    event_use& use = events_[named.event];
    use.used = number;
    use.recorded = named.records ? number : use.recorded;
  }
  accepted_.store(number, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) {
    came_.fetch_add(1, std::memory_order_release);
    futex_wake(came_);
  }
  return number;
}

bool submission_queue::push_decision(thread_slot const& self) {
  return push(
             self, {}, any_kind, 0, [](std::byte*) { return CUDA_SUCCESS; },
             [&](std::byte*) {  // from here it is taken
               decide_at_.store(decided_from(accepted_.load(std::memory_order_relaxed) + 1),
                                std::memory_order_release);
             },
             {nullptr, false, true}, true) != 0;
}

/// The first of the calls before `number` that, with those between, are expected to take no longer than
/// `decided_ahead`.
std::uint64_t submission_queue::decided_from(std::uint64_t number) const {
  std::chrono::nanoseconds ahead{};
  std::uint64_t const made = made_.load(std::memory_order_acquire);
  while (number - 1 > made) {
    deferred_call const& before = calls_[(number - 2) % capacity];
    ahead +=
        before.enters ? streams().expected(before.work.kind) : std::chrono::nanoseconds::zero();
    if (ahead > decided_ahead) {
      break;
    }
    --number;
  }
  return number;
}

void submission_queue::accept(kind_of_call kind) {
  std::lock_guard const guard{mutex_};
  kinds_.insert(kind);
}

void submission_queue::forget_kinds() {
  std::lock_guard const guard{mutex_};
  kinds_.clear();
}

submission_queue::event_use submission_queue::last_use(CUevent event) {
  std::lock_guard const guard{mutex_};
  auto const found = events_.find(event);
  return found != events_.end() ? found->second : event_use{};
}

std::uint64_t submission_queue::last_call_on(stream_use where) {
  if (name_of(where) == CU_STREAM_LEGACY || is_per_thread(where)) {
    return accepted_.load(std::memory_order_acquire);  // it waits for other streams as well
  }
  std::lock_guard const guard{mutex_};
  auto const found = streams_.find(name_of(where));
  return found != streams_.end() ? found->second : 0;
}

bool submission_queue::await(std::uint64_t number, bool interruptible, std::int64_t deadline_ns) {
  if (has_been_made(number) || spin_until([&] { return has_been_made(number); })) {
    return true;
  }
  bool undisturbed = true;
  while (!has_been_made(number) && (undisturbed || !interruptible)) {
    if (monotonic_ns() >= deadline_ns) {
      return false;
    }
    std::uint32_t const seen = went_.load(std::memory_order_acquire);
    std::uint64_t wanted = wake_at_.load(std::memory_order_relaxed);
    while (number < wanted &&
           !wake_at_.compare_exchange_weak(wanted, number, std::memory_order_seq_cst)) {
    }
    if (!has_been_made(number)) {
      undisturbed = futex_wait(went_, seen, nap);
    }
  }
  return undisturbed;
}

void submission_queue::finished() {
  std::uint64_t const number = made_.load(std::memory_order_relaxed) + 1;
  made_.store(number, std::memory_order_seq_cst);
  if (wake_at_.load(std::memory_order_seq_cst) <= number) {
    wake_at_.store(never, std::memory_order_seq_cst);
    went_.fetch_add(1, std::memory_order_release);
    futex_wake(went_);
  }
}

bool submission_queue::await_call() {
  auto const here = [this] { return !is_empty(); };
  if (here() || spin_until(here)) {
    return true;
  }
  the_gate().defer_no_longer();
  while (!here()) {
    if (ending_.load(std::memory_order_acquire)) {
      return false;
    }
    std::uint32_t const seen = came_.load(std::memory_order_acquire);
    asleep_.store(1, std::memory_order_seq_cst);
    if (accepted_.load(std::memory_order_seq_cst) == made_.load(std::memory_order_relaxed)) {
      futex_wait(came_, seen, nap);
    }
    asleep_.store(0, std::memory_order_relaxed);
  }
  return true;
}

CUresult submission_queue::make(thread_slot& self, deferred_call& call) {
  if (!call.enters) {
    return call.make(call.parameters.get());
  }
  gate& at = the_gate();
  auto const stale = [&] { return call.expendable && call.aborts != at.aborts(); };
  self.protect = call.protect || (the_commit().is_going() && the_commit().lies_in(this));
  self.expendable = call.expendable;
  if (the_commit().is_dropped(call.commit) || stale() ||
      at.enter(self, call.work) != CUDA_SUCCESS) {
    return CUDA_SUCCESS;  // dropped: it succeeds undone
  }
  // Whoever ends an abort has counted it before, so that seen from inside the answer is final.
  CUresult result = CUDA_SUCCESS;
  if (!stale()) {
    result = call.make(call.parameters.get());
    note_launch(at, self, call.work);
  }
  at.leave(self);
  return result;
}

void submission_queue::run() {
  real<CUresult (*)(CUcontext)>(symbol::of_cuCtxSetCurrent)(context());
  thread_slot& self = this_thread();
  while (await_call()) {
    std::uint64_t const made = made_.load(std::memory_order_relaxed);
    if (made + 1 >= decide_at_.load(std::memory_order_acquire)) [[unlikely]] {
      decide_at_.store(never, std::memory_order_relaxed);
      the_commit().reach();
    }
    CUresult const result = make(self, calls_[made % capacity]);
    if (result != CUDA_SUCCESS) {
      CUresult none = CUDA_SUCCESS;
      error_.compare_exchange_strong(none, result, std::memory_order_acq_rel);
    }
    finished();
  }
}

void submission_queue::end() {
  flush();
  ending_.store(true, std::memory_order_release);
  came_.fetch_add(1, std::memory_order_release);
  futex_wake(came_);
  ::pthread_join(submitter_, nullptr);
  std::lock_guard const guard{mutex_};
  context_.store(nullptr, std::memory_order_release);
  calls_ = nullptr;
}

}  // namespace sluice::gate
