/// Threads that wait for something to do, of which the last one that came is woken first: its caches are warm, and so is the processor
/// that it has waited on. As a condition variable otherwise, but for this: who notifies holds the lock as well.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace sluice::server::detail {

class waiting_threads {
 public:
  using clock = std::chrono::steady_clock;

  /// May return for no reason.
  void wait(std::unique_lock<std::mutex>& lock) { wait_until(lock, clock::time_point::max()); }

  void wait_until(std::unique_lock<std::mutex>& lock, clock::time_point until) {
    std::condition_variable here;
    waiting_.push_back(&here);
    if (until == clock::time_point::max()) {
      here.wait(lock);
    } else {
      here.wait_until(lock, until);
    }
    std::erase(waiting_, &here);
  }

  void notify_one() {
    if (!waiting_.empty()) {
      waiting_.back()->notify_one();
      waiting_.pop_back();
    }
  }

  void notify_all() {
    for (auto* const each : waiting_) {
      each->notify_one();
    }
    waiting_.clear();
  }

 private:
  std::vector<std::condition_variable*> waiting_;
};

}  // namespace sluice::server::detail
