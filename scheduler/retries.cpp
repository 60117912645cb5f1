#include "scheduler/retries.hpp"

#include <algorithm>
#include <functional>

namespace sluice::scheduler {
namespace {

constexpr seconds own_pause{10.0};
constexpr seconds longest_wait{3600.0};

}  // namespace

request_mark retries::mark_of(std::string_view id) noexcept {
  return id.empty() ? 0 : std::max<request_mark>(1, std::hash<std::string_view>{}(id));
}

void retries::forget_old(instant now) {
  while (!order_.empty() && (order_.front().until < now || order_.size() > most_known)) {
    auto const its = expected_.find(order_.front().request);
    if (its != expected_.end() && its->second == order_.front().until) {
      expected_.erase(its);
    }
    order_.pop_front();
  }
}

void retries::on_refusal(request_mark request, instant now, seconds retry_after) {
  if (request == 0) {
    return;
  }
  seconds const wait =
      retry_after.count() > 0.0 ? std::min(retry_after, longest_wait) : seconds{0.0};
  instant const until = now + 2.0 * wait + own_pause;
  expected_[request] = until;
  order_.push_back({request, until});
  forget_old(now);
}

bool retries::take(request_mark request, instant now) {
  if (request == 0 || order_.empty()) {
    return false;
  }
  forget_old(now);
  auto const its = expected_.find(request);
  if (its == expected_.end()) {
    return false;
  }
  bool const is_in_time = !(its->second < now);
  expected_.erase(its);
  return is_in_time;
}

}  // namespace sluice::scheduler
