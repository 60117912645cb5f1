/// Streams, events, captures and graphs of the fake driver.
///
/// A stream is a thread that does its work in order. A captured piece of work goes into the capture
/// instead, and a graph is the list of them, launched onto one stream.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tests/fake_driver/fake_context.hpp"

namespace sluice::fake {

using work = std::function<void()>;

/// A point in a stream: happened once everything before it is done.
struct marker {
  std::mutex lock;
  std::condition_variable happened_now;
  bool happened = false;                     // guarded by lock
  std::chrono::steady_clock::time_point at;  // guarded by lock
  void happen();
  void wait();
  [[nodiscard]] bool has_happened();
};

struct capture;

struct event {
  std::mutex lock;
  std::shared_ptr<marker> last;              // guarded by lock
  std::shared_ptr<capture> recorded_inside;  // guarded by lock
};

struct graph {
  std::vector<work> pieces;
};

struct capture {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool broken = false;
  std::uint64_t id = 0;
  graph* into = nullptr;  ///< its own until it ends, unless it was given one
  bool was_given = false;
};

class stream : public std::enable_shared_from_this<stream> {
 public:
  stream(context* in, unsigned flags, bool legacy) : context_{in}, flags_{flags}, legacy_{legacy} {}

  /// Starts the thread of a stream that is owned by a shared_ptr; the thread keeps it alive until
  /// `retire`.
  static std::shared_ptr<stream> start(context* in, unsigned flags, bool legacy = false);
  /// No more work will come; what was submitted is still done.
  void retire();

  void submit(work piece);
  [[nodiscard]] std::shared_ptr<marker> mark();
  [[nodiscard]] bool idle();

  [[nodiscard]] context* in() const noexcept { return context_; }
  [[nodiscard]] unsigned flags() const noexcept { return flags_; }
  [[nodiscard]] bool legacy() const noexcept { return legacy_; }

  std::shared_ptr<capture> captured_by;  ///< guarded by the lock of all captures

 private:
  void run();

  context* context_;
  unsigned flags_;
  bool legacy_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<work> queue_;  // guarded by lock_
  bool busy_ = false;       // guarded by lock_
  bool retired_ = false;    // guarded by lock_
  bool ended_ = false;      // guarded by lock_: the thread takes no more work
};

/// The stream that a handle names for the calling thread; nullptr if it names none.
[[nodiscard]] std::shared_ptr<stream> stream_of(CUstream handle, bool per_thread_default);

/// Puts a piece of work on a stream, or into the capture that the stream is in.
[[nodiscard]] CUresult enqueue(CUstream handle, bool per_thread_default, work piece);
/// The same, and waits until it is done.
[[nodiscard]] CUresult enqueue_and_wait(CUstream handle, bool per_thread_default, work piece);

/// What a call that may wait for the device has to return if a capture forbids it; the capture is
/// broken then.
[[nodiscard]] CUresult forbidden_by_capture();

void wait_for_context(context& one);

/// The calling thread's mode for calls beside captures.
[[nodiscard]] CUstreamCaptureMode& thread_capture_mode();
/// Every capture that is under way, and the lock of them all.
struct capture_list {
  std::mutex lock;
  std::set<std::shared_ptr<capture>> active;  // guarded by lock
};
[[nodiscard]] capture_list& captures();
/// Whether a stream is being captured that orders itself with the legacy stream. To be called with
/// that lock.
[[nodiscard]] bool some_blocking_stream_is_captured();
/// Its streams leave a capture that has ended. To be called with that lock.
void release_streams_of(capture const& ended);

/// Makes a created stream known by its handle, or unknown again.
[[nodiscard]] CUstream publish(std::shared_ptr<stream> const& made);
[[nodiscard]] std::shared_ptr<stream> withdraw(CUstream handle);

}  // namespace sluice::fake
