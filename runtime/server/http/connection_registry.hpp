/// Which connections of an endpoint are open, for counting and for ending them, and which of them have rested
/// for how long between two requests. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

namespace sluice::server {

class connection;

class connection_registry {
 public:
  /// False once `close` has been called.
  bool add(std::shared_ptr<connection> const& member);
  void remove(std::shared_ptr<connection> const& member);
  /// It waits for its client's next request, from now on.
  void rest(std::shared_ptr<connection> const& member);
  /// … until now.
  void wake(connection const& member);
  /// The one that has rested longest, which is woken by that; null: none rests.
  [[nodiscard]] std::shared_ptr<connection> take_longest_resting();
  /// The endpoint stops: no connection is to take another request.
  void close();
  /// Asked for every request, so without waiting for others.
  [[nodiscard]] bool is_closed() const noexcept { return closed_; }
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::set<std::shared_ptr<connection>> members() const;
  /// False if some are left at `deadline`.
  bool wait_until_empty(std::chrono::steady_clock::time_point deadline);

 private:
  mutable std::mutex mutex_;
  std::condition_variable emptied_;
  using resting_list = std::list<std::shared_ptr<connection>>;
  void wake_locked(connection const* member);

  std::set<std::shared_ptr<connection>> members_;  // under mutex_
  // Under mutex_: the longest first, and where each stands.
  resting_list resting_;
  std::unordered_map<connection const*, resting_list::iterator> places_;
  std::atomic<bool> closed_ = false;  // set under mutex_
};

}  // namespace sluice::server
