/// Which connections of an endpoint are open, for counting and for ending them. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

namespace sluice::server {

class connection;

class connection_registry {
 public:
  /// False once `close` has been called.
  bool add(std::shared_ptr<connection> const& member);
  void remove(std::shared_ptr<connection> const& member);
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
  std::set<std::shared_ptr<connection>> members_;  // under mutex_
  std::atomic<bool> closed_ = false;               // set under mutex_
};

}  // namespace sluice::server
