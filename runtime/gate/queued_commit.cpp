#include "runtime/gate/queued_commit.hpp"

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/futex.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/spinning.hpp"
#include "runtime/gate/submissions.hpp"

namespace sluice::gate {
namespace {

constinit queued_commit process_commit;

}  // namespace

bool queued_commit::begin(int (*decide)(void* of), void* of) {
  thread_slot& self = this_thread();
  submission_queue* const queue =
      the_gate().deferring() && takes_part(self) ? submissions_of_current_context() : nullptr;
  submission_queue* none = nullptr;
  if (queue == nullptr || !queue_.compare_exchange_strong(none, queue, std::memory_order_acq_rel)) {
    return false;
  }
  last_ = last_ + 1 != 0 ? last_ + 1 : 1;
  decide_ = decide;
  decide_of_ = of;
  if (!queue->push_decision(self)) {
    queue_.store(nullptr, std::memory_order_release);
    return false;
  }
  self.commit = last_;
  return true;
}

void queued_commit::reach() noexcept {
  bool const counts = decide_(decide_of_) != 0;
  if (!counts) {
    dropped_.store(last_, std::memory_order_release);
  }
  going_.store(counts, std::memory_order_release);
  decided_.store(last_, std::memory_order_release);
  futex_wake(decided_);
}

void queued_commit::close(void (*made)(void* of), void* of) {
  submission_queue& queue = *queue_.load(std::memory_order_relaxed);
  auto const reached = [this, made, of] {
    if (going_.load(std::memory_order_relaxed)) {
      made(of);
      going_.store(false, std::memory_order_release);
    }
    return CUDA_SUCCESS;
  };
  end_ = queue.push_step(this_thread(), reached);
  if (end_ == 0) {  // the bound was lifted: calls go straight, after those that lie there
    queue.flush();
    static_cast<void>(reached());
  }
}

std::optional<bool> queued_commit::resolve(std::int64_t deadline_ns) {
  this_thread().commit = 0;  // whoever does not wait on launches for himself
  auto const is_decided = [this] { return decided_.load(std::memory_order_acquire) == last_; };
  static_cast<void>(spin_until(is_decided));
  for (std::uint32_t seen = decided_.load(); seen != last_; seen = decided_.load()) {
    if (monotonic_ns() >= deadline_ns) {
      return std::nullopt;
    }
    futex_wait(decided_, seen, nap_at_most);
  }
  if (!is_dropped(last_)) {
    return true;
  }
  return await_end(deadline_ns) ? std::optional{false} : std::nullopt;
}

bool queued_commit::await_end(std::int64_t deadline_ns) {
  submission_queue* const queue = queue_.load(std::memory_order_relaxed);
  if (queue != nullptr && !queue->flush_to(end_, deadline_ns)) {
    return false;
  }
  queue_.store(nullptr, std::memory_order_release);
  return true;
}

queued_commit& the_commit() noexcept {
  return process_commit;
}

}  // namespace sluice::gate
