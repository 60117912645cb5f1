#include "scheduler/detail/interval_window.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace sluice::scheduler::detail {

void interval_window::add(interval ended) {
  if (ended.from == ended.to) {
    return;
  }
  if (!past_.empty() && past_.back().to == ended.from) {
    past_.back().to = ended.to;
    return;
  }
  past_.push_back(ended);
  if (past_.size() <= most_) {
    return;
  }
  auto nearest = past_.begin();
  for (auto each = past_.begin(); std::next(each) != past_.end(); ++each) {
    if (std::next(each)->from - each->to < std::next(nearest)->from - nearest->to) {
      nearest = each;
    }
  }
  nearest->to = std::next(nearest)->to;
  past_.erase(std::next(nearest));
}

void interval_window::forget_before(time_point now) {
  while (!past_.empty() && past_.front().to <= now - length_) {
    past_.pop_front();
  }
}

interval_window::nanoseconds interval_window::part_of(interval const& one, time_point now) const {
  return std::max(nanoseconds::zero(), std::min(one.to, now) - std::max(one.from, now - length_));
}

interval_window::nanoseconds interval_window::within(time_point now) const {
  return std::accumulate(
      past_.begin(), past_.end(), nanoseconds::zero(),
      [&](nanoseconds sum, interval const& each) { return sum + part_of(each, now); });
}

/// While the interval lasts, the window's start moves over the past: over an earlier one, what leaves the window is what comes
/// in; between two, the sum grows.
interval_window::nanoseconds interval_window::longest_from(time_point begin,
                                                           nanoseconds allowed) const {
  auto start = begin - length_;
  auto still_in = nanoseconds::zero();
  for (auto const& each : past_) {
    still_in += std::max(nanoseconds::zero(), each.to - std::max(each.from, start));
  }
  auto longest = nanoseconds::zero();
  for (auto const& each : past_) {
    if (each.to <= start) {
      continue;
    }
    auto const between = std::max(nanoseconds::zero(), each.from - start);
    auto const room = allowed - still_in - longest;
    if (between > room) {
      return longest + std::max(nanoseconds::zero(), room);
    }
    auto const leaves = each.to - std::max(each.from, start);
    longest += between + leaves;
    still_in -= leaves;
    start = each.to;
  }
  return allowed;
}

/// At its end, what is left of the past may fill the rest.
interval_window::time_point interval_window::first_with(nanoseconds length,
                                                        nanoseconds allowed) const {
  auto room = allowed - length;
  auto const fills_it = std::find_if(past_.rbegin(), past_.rend(), [&](interval const& each) {
    auto const took = each.to - each.from;
    if (took > room) {
      return true;
    }
    room -= took;
    return false;
  });
  if (fills_it != past_.rend()) {
    return fills_it->to - room + length_ - length;
  }
  return time_point::min();
}

}  // namespace sluice::scheduler::detail
