#include "runtime/server/engines/token_account.hpp"

#include <algorithm>
#include <iterator>

namespace sluice::server {

void token_distribution::add(std::chrono::nanoseconds took) {
  auto const seconds = std::chrono::duration<double>{took}.count();
  auto const place = std::lower_bound(bounds.begin(), bounds.end(), seconds);
  ++counts.at(static_cast<std::size_t>(std::distance(bounds.begin(), place)));
  total += took;
}

token_account::token_account(policy::objective_policy const& promise, clock::time_point now)
    : ttft_(promise.ttft),
      tbt_(promise.tbt),
      first_seen_{promise.window, now},
      gaps_seen_{promise.window, now} {}

void token_account::add(clock::time_point now, token_times const& came) {
  if (came.first) {
    first_.add(*came.first);
    if (ttft_.count() > 0) first_seen_.add(now, *came.first <= ttft_);
  }
  for (auto const& gap : came.gaps) {
    gaps_.add(gap);
    if (tbt_.count() > 0) gaps_seen_.add(now, gap <= tbt_);
  }
}

std::optional<double> token_account::first_in_time(clock::time_point now) noexcept {
  return first_seen_.read(now).share();
}

std::optional<double> token_account::gaps_in_time(clock::time_point now) noexcept {
  return gaps_seen_.read(now).share();
}

}  // namespace sluice::server
