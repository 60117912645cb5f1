/// Which calls of a gRPC endpoint have not ended, for counting them and for ending them. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sluice::server {

class rpc_call;

class call_registry {
 public:
  /// False if there are `most` already.
  [[nodiscard]] bool add(std::shared_ptr<rpc_call> const& member, std::size_t most) {
    std::lock_guard const lock{mutex_};
    if (members_.size() >= most) return false;
    members_.emplace(member.get(), member);
    return true;
  }
  void remove(rpc_call const* member) {
    std::lock_guard const lock{mutex_};
    members_.erase(member);
  }
  /// The endpoint stops: no call is to begin, none to take another request.
  void close() { closed_ = true; }
  [[nodiscard]] bool is_closed() const noexcept { return closed_; }
  [[nodiscard]] std::size_t size() const {
    std::lock_guard const lock{mutex_};
    return members_.size();
  }
  [[nodiscard]] std::vector<std::shared_ptr<rpc_call>> members() const {
    std::lock_guard const lock{mutex_};
    std::vector<std::shared_ptr<rpc_call>> result;
    for (auto const& [key, each] : members_) {
      if (auto member = each.lock()) result.push_back(std::move(member));
    }
    return result;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<rpc_call const*, std::weak_ptr<rpc_call>> members_;  // under mutex_
  std::atomic<bool> closed_ = false;
};

}  // namespace sluice::server
