/// All contexts' queues: found, asked, waited for and ended together.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/streams.hpp"
#include "runtime/gate/submission.hpp"

namespace sluice::gate {

/// The queue of the current context, made at its first use; nullptr without a context.
[[nodiscard]] submission_queue* submissions_of_current_context();
/// Flushes all queues, for a call of that function. Nothing for threads that take no part in gating.
void flush_submissions(std::optional<symbol> cause) noexcept;
/// How often calls of one function have had to wait for that, and how long.
struct flush_count {
  std::atomic<std::uint64_t> times{0};
  std::atomic<std::int64_t> waited_ns{0};
};
[[nodiscard]] flush_count const& flushes_by(symbol cause) noexcept;
/// The same for whoever ends the process, until the deadline (CLOCK_MONOTONIC) at most.
void flush_submissions_until(std::int64_t deadline_ns) noexcept;
/// What has been left and not been made never will be; from now on calls go straight.
void abandon_submissions() noexcept;
/// The first error that any queue holds; see `take_error`.
[[nodiscard]] CUresult take_submission_error() noexcept;
/// Does that if no queue holds anything, while nobody can leave a call in any, nor in a new one.
void if_none_is_left(void (*then)(void* of), void* of) noexcept;
/// Whether an event's record has still to be made.
[[nodiscard]] bool record_is_pending(CUevent event) noexcept;
/// The queue in which calls that name an event have still to be made; nullptr if there is none. If there
/// are several, it waits for those of the others.
[[nodiscard]] submission_queue* last_queue_that_uses(CUevent event) noexcept;
/// Waits until an event's last record has been made.
void flush_record(CUevent event) noexcept;
/// Flushes what a stream that is about to be asked or waited for has been given.
void flush_stream(stream_use where) noexcept;
[[nodiscard]] bool stream_is_pending(stream_use where) noexcept;
/// Calls that have been left to submitters since the process started.
[[nodiscard]] std::uint64_t deferred_calls() noexcept;
/// Kernels have gone.
void forget_kinds_of_calls() noexcept;
/// The context is about to be destroyed, or the device's primary one has gone.
void end_submissions(CUcontext context) noexcept;
void end_submissions_on(int device) noexcept;

}  // namespace sluice::gate
