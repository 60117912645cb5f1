#include "tests/fake_driver/fake_stream.hpp"

#include <map>
#include <utility>

#include "tests/fake_driver/fake_driver.h"

namespace sluice::fake {
namespace {

std::atomic<std::uint64_t> outstanding{0};
std::atomic<std::uint64_t> outstanding_peak{0};
std::atomic<std::uint64_t> broken_captures{0};

struct registry {
  std::mutex lock;
  std::map<CUstream, std::shared_ptr<stream>> created;  // guarded by lock
  std::set<std::shared_ptr<stream>> all;                // guarded by lock: default streams too
};

registry& the_registry() {
  static registry& one = *new registry;  // never freed: threads of streams outlive static objects
  return one;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

struct thread_streams {
  std::map<context*, std::shared_ptr<stream>> by_context;
  ~thread_streams() {
    for (auto& [in, one] : by_context) {
      one->retire();
    }
  }
};
thread_local thread_streams own_streams;

void break_capture(capture& one) {
  if (!one.broken) {
    one.broken = true;
    broken_captures.fetch_add(1);
  }
}

}  // namespace

capture_list& captures() {
  static capture_list& one = *new capture_list;
  return one;
}

CUstreamCaptureMode& thread_capture_mode() {
  return thread_mode;
}

// Legacy stream and streams that synchronise with it must not be captured beside each other.
bool some_blocking_stream_is_captured() {
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  for (auto const& [handle, one] : known.created) {
    if (one->captured_by != nullptr && (one->flags() & CU_STREAM_NON_BLOCKING) == 0) {
      return true;
    }
  }
  return false;
}

void release_streams_of(capture const& ended) {
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  for (auto const& one : known.all) {
    if (one->captured_by.get() == &ended) {
      one->captured_by = nullptr;
    }
  }
}

CUstream publish(std::shared_ptr<stream> const& made) {
  auto* handle = reinterpret_cast<CUstream>(made.get());
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  known.created.emplace(handle, made);
  return handle;
}

std::shared_ptr<stream> withdraw(CUstream handle) {
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  auto const found = known.created.find(handle);
  if (found == known.created.end()) {
    return nullptr;
  }
  std::shared_ptr<stream> one = found->second;
  known.created.erase(found);
  return one;
}

void marker::happen() {
  std::lock_guard const guard{lock};
  happened = true;
  at = std::chrono::steady_clock::now();
  happened_now.notify_all();
}

void marker::wait() {
  std::unique_lock guard{lock};
  happened_now.wait(guard, [this] { return happened; });
}

bool marker::has_happened() {
  std::lock_guard const guard{lock};
  return happened;
}

std::shared_ptr<stream> stream::start(context* in, unsigned flags, bool legacy) {
  auto made = std::make_shared<stream>(in, flags, legacy);
  std::thread{[made] { made->run(); }}.detach();
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  known.all.insert(made);
  return made;
}

void stream::retire() {
  {
    std::lock_guard const guard{lock_};
    retired_ = true;
  }
  changed_.notify_all();
}

void stream::submit(work piece) {
  std::uint64_t const now = outstanding.fetch_add(1) + 1;
  std::uint64_t peak = outstanding_peak.load();
  while (peak < now && !outstanding_peak.compare_exchange_weak(peak, now)) {
  }
  {
    std::lock_guard const guard{lock_};
    queue_.emplace_back([piece = std::move(piece)] {
      piece();
      outstanding.fetch_sub(1);
    });
  }
  changed_.notify_all();
}

std::shared_ptr<marker> stream::mark() {
  auto point = std::make_shared<marker>();
  {
    std::lock_guard const guard{lock_};
    if (ended_) {
      point->happen();
      return point;
    }
    outstanding.fetch_add(1);
    queue_.emplace_back([point] {
      outstanding.fetch_sub(1);  // before anybody can see that it has happened
      point->happen();
    });
  }
  changed_.notify_all();
  return point;
}

bool stream::idle() {
  std::lock_guard const guard{lock_};
  return queue_.empty() && !busy_;
}

void stream::run() {
  std::unique_lock guard{lock_};
  for (;;) {
    changed_.wait(guard, [this] { return retired_ || !queue_.empty(); });
    if (queue_.empty()) {
      ended_ = true;
      break;
    }
    work piece = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    guard.unlock();
    piece();
    piece = nullptr;
    guard.lock();
    busy_ = false;
  }
  guard.unlock();
  registry& known = the_registry();
  std::lock_guard const other{known.lock};
  known.all.erase(shared_from_this());
}

std::shared_ptr<stream> stream_of(CUstream handle, bool per_thread_default) {
  context* in = current_context();
  if (in == nullptr) {
    return nullptr;
  }
  bool const per_thread =
      handle == CU_STREAM_PER_THREAD || (handle == nullptr && per_thread_default);
  if (per_thread) {
    std::shared_ptr<stream>& one = own_streams.by_context[in];
    if (one == nullptr) {
      one = stream::start(in, 0);
    }
    return one;
  }
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    std::lock_guard const guard{in->lock};
    if (in->legacy == nullptr) {
      in->legacy = stream::start(in, 0, true);
    }
    return in->legacy;
  }
  registry& known = the_registry();
  std::lock_guard const guard{known.lock};
  auto const found = known.created.find(handle);
  return found != known.created.end() ? found->second : nullptr;
}

CUresult enqueue(CUstream handle, bool per_thread_default, work piece) {
  std::shared_ptr<stream> const on = stream_of(handle, per_thread_default);
  if (on == nullptr) {
    return current_context() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
  }
  capture_list& all = captures();
  std::lock_guard const guard{all.lock};
  if (on->captured_by != nullptr) {
    if (on->captured_by->broken) {
      return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    on->captured_by->into->pieces.push_back(std::move(piece));
    return CUDA_SUCCESS;
  }
  if (on->legacy() && !all.active.empty() && some_blocking_stream_is_captured()) {
    for (auto const& one : all.active) {
      break_capture(*one);
    }
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  on->submit(std::move(piece));
  return CUDA_SUCCESS;
}

CUresult enqueue_and_wait(CUstream handle, bool per_thread_default, work piece) {
  if (CUresult const forbidden = forbidden_by_capture(); forbidden != CUDA_SUCCESS) {
    return forbidden;
  }
  auto point = std::make_shared<marker>();
  CUresult const result = enqueue(handle, per_thread_default, [point, piece = std::move(piece)] {
    piece();
    point->happen();
  });
  if (result != CUDA_SUCCESS) {
    return result;
  }
  point->wait();
  return context_state();
}

CUresult forbidden_by_capture() {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_SUCCESS;
  }
  capture_list& all = captures();
  std::lock_guard const guard{all.lock};
  CUresult result = CUDA_SUCCESS;
  for (auto const& one : all.active) {
    bool const own =
        one->thread == std::this_thread::get_id() && one->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    bool const global =
        one->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (own || global) {
      break_capture(*one);
      result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  return result;
}

void wait_for_context(context& one) {
  std::vector<std::shared_ptr<marker>> points;
  {
    registry& known = the_registry();
    std::lock_guard const guard{known.lock};
    for (auto const& each : known.all) {
      if (each->in() == &one) {
        points.push_back(each->mark());
      }
    }
  }
  for (auto const& point : points) {
    point->wait();
  }
}

}  // namespace sluice::fake

using namespace sluice::fake;

extern "C" {
[[gnu::visibility("default")]] uint64_t fake_outstanding(void) {
  return outstanding.load();
}
[[gnu::visibility("default")]] uint64_t fake_outstanding_peak(void) {
  return outstanding_peak.exchange(outstanding.load());
}
[[gnu::visibility("default")]] uint64_t fake_broken_captures(void) {
  return broken_captures.load();
}
}
