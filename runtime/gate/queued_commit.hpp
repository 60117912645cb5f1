/// A commit whose calls lie in a queue before it is known whether they will be made; docs/gate.md draws
/// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "runtime/gate/submission.hpp"

namespace sluice::gate {

/// A commit that is left to the submitter. What its thread launches from its beginning until it is
/// resolved is made as a whole or not at all; which, is decided when the submitter comes to it, or to
/// the last of what was launched before.
///
///   none ──begin──► undecided ──decide: 1──► going (resolve: true) ──close, and made──► none
///                       └───────decide: 0──► dropped ──close, and resolve: false──────► none
///
/// While it is going its queue's calls are protected, whoever has made them: they lie before its end.
/// There is one at a time in a process, because there is one arena.
///
/// Thread-safety: `begin` and the questions from any thread, `reach` from the submitter; the rest from
/// the one that commits.
class queued_commit {
 public:
  /// Leaves a commit of the calling thread. False if nothing lies in the queue of its context, or
  /// another commit has not been awaited: then it can be decided at once.
  [[nodiscard]] bool begin(int (*decide)(void* of), void* of);
  /// What is launched from now on comes after the commit, but is made only with it. `made` is called
  /// when all before has been made; not if it is dropped.
  void close(void (*made)(void* of), void* of);
  /// Waits until it is decided; false: it has been dropped. Nothing if the deadline (CLOCK_MONOTONIC)
  /// passes first. The thread's calls are its own again.
  [[nodiscard]] std::optional<bool> resolve(std::int64_t deadline_ns);
  /// Waits until the last one, if any, has been made or dropped; false if the deadline passes first.
  [[nodiscard]] bool await_end(std::int64_t deadline_ns);

  [[nodiscard]] bool is_dropped(std::uint32_t which) const noexcept {
    return which != 0 && dropped_.load(std::memory_order_acquire) == which;
  }
  /// Whether the calls of a thread whose context's queue is `queue` can be left there.
  [[nodiscard]] bool lies_in(submission_queue const* queue) const noexcept {
    return queue_.load(std::memory_order_acquire) == queue;
  }
  [[nodiscard]] bool is_going() const noexcept { return going_.load(std::memory_order_acquire); }
  /// The submitter has come to it: decides.
  void reach() noexcept;

 private:
  std::atomic<submission_queue*> queue_{nullptr};  // not null from `begin` until it was awaited
  std::atomic<std::uint32_t> decided_{0};          // the last that was decided
  std::atomic<std::uint32_t> dropped_{0};          // the last that was dropped
  std::atomic<bool> going_{false};                 // written by the submitter
  int (*decide_)(void* of) = nullptr;
  void* decide_of_ = nullptr;
  std::uint32_t last_ = 0;
  std::uint64_t end_ = 0;  // number of the step that ends it
};
/// The process's one.
[[nodiscard]] queued_commit& the_commit() noexcept;

}  // namespace sluice::gate
