#include "runtime/gate/submission.hpp"

#include <algorithm>
#include <chrono>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/futex.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/own_thread.hpp"
#include "runtime/gate/queued_commit.hpp"
#include "runtime/gate/spinning.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// A commit is decided with so much work to be made before it: about what Python needs from there to
/// the next launches. A demand that comes in this time waits for the commit.
constexpr std::chrono::nanoseconds decided_ahead = 600us;

/// Whether the legacy stream is ordered with it.
bool is_blocking(void* stream) noexcept {
  unsigned flags = 0;
  return real<CUresult (*)(CUstream, unsigned*)>(symbol::of_cuStreamGetFlags)(
             static_cast<CUstream>(stream), &flags) != CUDA_SUCCESS ||
         (flags & CU_STREAM_NON_BLOCKING) == 0;
}

}  // namespace

bool are_ordered(void* one, void* other) noexcept {
  return (one == CU_STREAM_LEGACY && is_blocking(other)) ||
         (other == CU_STREAM_LEGACY && is_blocking(one));
}

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
  return start_own_thread<&submission_queue::run>(submitter_, "sluice-submit", *this);
}

deferred_call* submission_queue::reserve(std::unique_lock<std::mutex>& lock, kind_of_call kind) {
  std::size_t length = usual_length;
  for (;;) {
    if (abandoned_ || !the_gate().leaves_calls() || (kind != any_kind && kinds_.count(kind) == 0)) {
      return nullptr;
    }
    std::uint64_t const next = accepted_.load(std::memory_order_relaxed);
    if (next - made_.load(std::memory_order_acquire) < length) {
      return &calls_[next % capacity];
    }
    lock.unlock();
    if (!await(next - length + 1, extent::all_before, length == usual_length)) {
      length = capacity;
    }
    lock.lock();
  }
}

std::uint64_t submission_queue::publish(deferred_call& place, thread_slot const& self,
                                        named_event named) {
  place.enters = !named.beside_gate;
  place.agreed = named.agreed;
  place.event = named.event;
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
    use.where = place.work.stream;
    use.recorded = named.records ? number : use.recorded;
  }
  accepted_.store(number, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) {
    came_.fetch_add(1, std::memory_order_release);
    futex_wake(came_);
  }
  return number;
}

bool submission_queue::push_agreed(thread_slot const& self, sluice_agreed_call const& call) {
  return push(
             self, {{static_cast<CUstream>(call.stream), false}, 0}, any_kind, sizeof(call),
             [](std::byte*) { return CUDA_SUCCESS; },  // `hold_behind` makes it
             [&call](std::byte* at) { std::memcpy(at, &call, sizeof(call)); },
             {nullptr, false, true, true}) != 0;
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

std::vector<std::uint64_t> submission_queue::pending_calls_before(stream_use where) {
  // The per-thread stream, on which nothing is left, is ordered with the legacy one.
  void* const name = is_per_thread(where) ? CU_STREAM_LEGACY : name_of(where);
  std::vector<std::uint64_t> found;
  std::lock_guard const guard{mutex_};
  if (is_empty()) {
    return found;
  }
  if (name != CU_STREAM_LEGACY) {
    if (auto const last = streams_.find(name);
        last != streams_.end() && !has_been_made(last->second)) {
      found.push_back(last->second);
    }
    return found;
  }
  for (auto const& [stream, number] : streams_) {  // those with calls to be made are alive
    if (!has_been_made(number) && (stream == name || are_ordered(stream, name))) {
      found.push_back(number);
    }
  }
  return found;
}

void submission_queue::flush_stream(stream_use where) {
  for (std::uint64_t const number : pending_calls_before(where)) {
    await(number, extent::itself);
  }
}

bool submission_queue::await(std::uint64_t number, extent what, bool interruptible,
                             std::int64_t deadline_ns) {
  auto const done = [&] { return have_been_made(number, what); };
  if (done() || spin_until(done)) {
    return true;
  }
  bool undisturbed = true;
  while (!done() && (undisturbed || !interruptible)) {
    if (monotonic_ns() >= deadline_ns) {
      return false;
    }
    std::uint32_t const seen = went_.load(std::memory_order_acquire);
    std::uint64_t wanted = wake_at_.load(std::memory_order_relaxed);
    while (number < wanted &&
           !wake_at_.compare_exchange_weak(wanted, number, std::memory_order_seq_cst)) {
    }
    if (!done()) {
      undisturbed = futex_wait(went_, seen, nap_at_most);
    }
  }
  return undisturbed;
}

void submission_queue::end_with(std::uint64_t number, CUresult result) {
  keep_error(result);
  ended_[number % capacity].store(number, std::memory_order_seq_cst);
  std::uint64_t made = made_.load(std::memory_order_relaxed);
  while (ended_[(made + 1) % capacity].load(std::memory_order_relaxed) == made + 1) {
    ++made;
  }
  made_.store(made, std::memory_order_seq_cst);
  if (wake_at_.load(std::memory_order_seq_cst) <= std::max(number, made)) {
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
  while (!here()) {
    if (ending_.load(std::memory_order_acquire)) {
      return false;
    }
    if (monotonic_ns() - agreed_ns_ >= std::chrono::nanoseconds{left_behind_others}.count()) {
      the_gate().defer_no_longer();
    }
    std::uint32_t const seen = came_.load(std::memory_order_acquire);
    asleep_.store(1, std::memory_order_seq_cst);
    if (accepted_.load(std::memory_order_seq_cst) == made_.load(std::memory_order_relaxed)) {
      futex_wait(came_, seen, nap_at_most);
    }
    asleep_.store(0, std::memory_order_relaxed);
  }
  return true;
}

void submission_queue::take_exemptions(thread_slot& self, deferred_call const& call) const {
  self.protect = call.protect || (the_commit().is_going() && the_commit().lies_in(this));
  self.expendable = call.expendable;
}

/// Whether it belongs to what was dropped. Whoever ends an abort has counted it before, so that asked
/// from inside the gate the answer is final.
bool submission_queue::is_dropped(deferred_call const& call) const {
  return the_commit().is_dropped(call.commit) ||
         (call.expendable && call.aborts != the_gate().aborts());
}

CUresult submission_queue::make(thread_slot& self, deferred_call& call) {
  own_work const work;
  if (!call.enters) {
    return call.make(call.parameters.get());
  }
  gate& at = the_gate();
  take_exemptions(self, call);
  if (is_dropped(call) || at.enter(self, call.work) != CUDA_SUCCESS) {
    return CUDA_SUCCESS;  // dropped: it succeeds undone
  }
  own_work::go_on();
  CUresult result = CUDA_SUCCESS;
  if (!is_dropped(call)) {
    result = call.make(call.parameters.get());
    note_launch(at, self, call.work);
  }
  at.leave(self);
  return result;
}

void submission_queue::run() {
  {
    own_work const work;
    real<CUresult (*)(CUcontext)>(symbol::of_cuCtxSetCurrent)(context());
  }
  thread_slot& self = this_thread();
  while (await_call()) {
    std::uint64_t const number = ++taken_;
    if (number >= decide_at_.load(std::memory_order_acquire)) [[unlikely]] {
      decide_at_.store(never, std::memory_order_relaxed);
      the_commit().reach();
    }
    if (deferred_call& call = call_of(number); call.agreed) [[unlikely]] {
      hold_behind(self, number);
    } else {
      end_with(number, make(self, call));
    }
  }
}

void submission_queue::abandon() {
  {
    std::lock_guard const guard{mutex_};
    abandoned_ = true;
    made_.store(accepted_.load(std::memory_order_relaxed), std::memory_order_seq_cst);
  }
  went_.fetch_add(1, std::memory_order_release);
  futex_wake(went_);
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
