#include "runtime/server/http/connection_registry.hpp"

namespace sluice::server {

bool connection_registry::add(std::shared_ptr<connection> const& member) {
  std::lock_guard const lock{mutex_};
  if (closed_) return false;
  members_.insert(member);
  return true;
}

void connection_registry::remove(std::shared_ptr<connection> const& member) {
  std::lock_guard const lock{mutex_};
  wake_locked(member.get());
  members_.erase(member);
  if (members_.empty()) emptied_.notify_all();
}

void connection_registry::rest(std::shared_ptr<connection> const& member) {
  std::lock_guard const lock{mutex_};
  places_.insert_or_assign(member.get(), resting_.insert(resting_.end(), member));
}

void connection_registry::wake(connection const& member) {
  std::lock_guard const lock{mutex_};
  wake_locked(&member);
}

void connection_registry::wake_locked(connection const* member) {
  if (auto const found = places_.find(member); found != places_.end()) {
    resting_.erase(found->second);
    places_.erase(found);
  }
}

std::shared_ptr<connection> connection_registry::take_longest_resting() {
  std::lock_guard const lock{mutex_};
  if (resting_.empty()) return nullptr;
  auto longest = resting_.front();
  wake_locked(longest.get());
  return longest;
}

void connection_registry::close() {
  std::lock_guard const lock{mutex_};
  closed_ = true;
}

std::size_t connection_registry::size() const {
  std::lock_guard const lock{mutex_};
  return members_.size();
}

std::set<std::shared_ptr<connection>> connection_registry::members() const {
  std::lock_guard const lock{mutex_};
  return members_;
}

bool connection_registry::wait_until_empty(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock{mutex_};
  return emptied_.wait_until(lock, deadline, [this] { return members_.empty(); });
}

}  // namespace sluice::server
