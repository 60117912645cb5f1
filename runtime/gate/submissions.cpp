#include "runtime/gate/submissions.hpp"

#include <array>
#include <memory>
#include <mutex>

#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {
namespace {

/// All queues, the newest first. It only grows; a queue whose context has gone has none.
struct queue_node {
  explicit queue_node(CUcontext context) noexcept : queue{context} {}
  submission_queue queue;
  queue_node* next = nullptr;
};

constinit std::atomic<queue_node*> queues{nullptr};
constinit std::mutex adding;
constinit std::mutex listing;  ///< what `queues` is; after `adding`, before a queue's own
constinit std::array<flush_count, symbol_count> flushes{};

template <typename Each>
void for_each_queue(Each each) {
  for (queue_node* node = queues.load(std::memory_order_acquire); node != nullptr;
       node = node->next) {
    if (node->queue.context() != nullptr) {
      each(node->queue);
    }
  }
}

submission_queue* queue_of(CUcontext context) {
  submission_queue* found = nullptr;
  for_each_queue([&](submission_queue& one) {
    if (one.context() == context) {
      found = &one;
    }
  });
  return found;
}

/// With the locks of all queues from that one on, unless one is not empty.
void with_all_empty(queue_node* node, void (*then)(void* of), void* of) noexcept {
  if (node == nullptr) {
    then(of);
  } else if (auto const held = node->queue.hold_if_empty(); held.owns_lock()) {
    with_all_empty(node->next, then, of);
  }
}

}  // namespace

submission_queue* submissions_of_current_context() {
  CUcontext const context = driver::current_context();
  if (context == nullptr) {
    return nullptr;
  }
  if (submission_queue* const known = queue_of(context); known != nullptr) {
    return known;
  }
  std::lock_guard const guard{adding};
  if (submission_queue* const known = queue_of(context); known != nullptr) {
    return known;
  }
  auto made = std::make_unique<queue_node>(context);
  if (!made->queue.start()) {
    return nullptr;
  }
  std::lock_guard const listed{listing};
  made->next = queues.load(std::memory_order_relaxed);
  queue_node* const node = made.release();  // its submitter lives as long as the process
  queues.store(node, std::memory_order_release);
  return &node->queue;
}

void flush_submissions(std::optional<symbol> cause) noexcept {
  bool all_made = true;
  for_each_queue([&](submission_queue& one) { all_made = all_made && one.is_empty(); });
  if (all_made || !takes_part(this_thread())) {
    return;
  }
  std::int64_t const begun = monotonic_ns();
  for_each_queue([](submission_queue& one) { one.flush(); });
  if (cause.has_value()) {
    flush_count& count = flushes[static_cast<std::size_t>(*cause)];
    count.times.fetch_add(1, std::memory_order_relaxed);
    count.waited_ns.fetch_add(monotonic_ns() - begun, std::memory_order_relaxed);
  }
}

void flush_submissions_until(std::int64_t deadline_ns) noexcept {
  for_each_queue([deadline_ns](submission_queue& one) {
    static_cast<void>(one.flush_to(one.accepted(), deadline_ns));
  });
}

void abandon_submissions() noexcept {
  for_each_queue([](submission_queue& one) { one.abandon(); });
}

flush_count const& flushes_by(symbol cause) noexcept {
  return flushes[static_cast<std::size_t>(cause)];
}

CUresult take_submission_error() noexcept {
  CUresult found = CUDA_SUCCESS;
  for_each_queue([&](submission_queue& one) {
    if (found == CUDA_SUCCESS) {
      found = one.take_error();
    }
  });
  return found;
}

void if_none_is_left(void (*then)(void* of), void* of) noexcept {
  std::lock_guard const guard{listing};
  with_all_empty(queues.load(std::memory_order_acquire), then, of);
}

bool record_is_pending(CUevent event) noexcept {
  bool any = false;
  for_each_queue([&](submission_queue& one) { any = any || one.record_is_pending(event); });
  return any;
}

submission_queue* last_queue_that_uses(CUevent event) noexcept {
  submission_queue* found = nullptr;
  for_each_queue([&](submission_queue& one) {
    if (one.uses_event(event)) {
      if (found != nullptr) {
        found->flush_event(event);
      }
      found = &one;
    }
  });
  return found;
}

void flush_record(CUevent event) noexcept {
  for_each_queue([event](submission_queue& one) { one.flush_record(event); });
}

void flush_stream(stream_use where) noexcept {
  for_each_queue([where](submission_queue& one) { one.flush_stream(where); });
}

bool stream_is_pending(stream_use where) noexcept {
  bool any = false;
  for_each_queue([&](submission_queue& one) { any = any || one.uses_stream(where); });
  return any;
}

std::uint64_t deferred_calls() noexcept {
  std::uint64_t sum = 0;
  for (queue_node const* node = queues.load(std::memory_order_acquire); node != nullptr;
       node = node->next) {
    sum += node->queue.accepted();
  }
  return sum;
}

void forget_kinds_of_calls() noexcept {
  for_each_queue([](submission_queue& one) { one.forget_kinds(); });
}

void end_submissions(CUcontext context) noexcept {
  std::lock_guard const guard{adding};
  if (submission_queue* const known = queue_of(context); known != nullptr) {
    known->end();
  }
}

void end_submissions_on(int device) noexcept {
  std::lock_guard const guard{adding};
  for_each_queue([device](submission_queue& one) {
    if (one.device() == device) {
      one.end();
    }
  });
}

}  // namespace sluice::gate
