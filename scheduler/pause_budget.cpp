#include "scheduler/pause_budget.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

constexpr int worthwhile_divisor = 8;

}  // namespace

pause_budget::pause_budget(double min_share, nanoseconds window) : window_(window) {
  if (!(min_share >= 0.0 && min_share <= 1.0)) {
    throw std::invalid_argument("min_share must be in [0, 1]; got " + std::to_string(min_share));
  }
  if (window <= nanoseconds::zero()) {
    throw std::invalid_argument("the window must be longer than 0 ns; got " +
                                std::to_string(window.count()));
  }
  auto const kept = std::ceil(min_share * static_cast<double>(window.count()));
  allowed_ = window - nanoseconds{static_cast<nanoseconds::rep>(kept)};
  worthwhile_ = std::max(nanoseconds{1}, allowed_ / worthwhile_divisor);
}

pause_budget::time_point pause_budget::begin(time_point now) {
  last_ = std::max(last_, now);
  if (held_) {
    return limit_;
  }
  forget_before(last_ - window_);
  if (unlimited()) {
    limit_ = time_point::max();
  } else {
    auto const longest = longest_from(last_);
    if (longest < (used_up_ ? worthwhile_ : nanoseconds{1})) {
      used_up_ = true;
      return now;
    }
    limit_ = last_ + longest;
  }
  used_up_ = false;
  held_ = true;
  begun_ = last_;
  return limit_;
}

void pause_budget::end(time_point now) {
  last_ = std::max(last_, now);
  if (!held_) {
    return;
  }
  held_ = false;
  used_up_ = last_ >= limit_;
  remember({begun_, std::min(last_, limit_)});
}

pause_budget::time_point pause_budget::next_begin() const {
  if (unlimited()) {
    return last_;
  }
  return allowed_ == nanoseconds::zero() ? time_point::max()
                                         : first_with(used_up_ ? worthwhile_ : nanoseconds{1});
}

pause_budget::nanoseconds pause_budget::held_in_window(time_point now) const {
  auto const start = now - window_;
  auto sum = nanoseconds::zero();
  auto add = [&](interval const& pause) {
    sum += std::max(nanoseconds::zero(), std::min(pause.to, now) - std::max(pause.from, start));
  };
  std::for_each(past_.begin(), past_.end(), add);
  if (held_) {
    add({begun_, limit_});
  }
  return sum;
}

/// The longest pause from `begin` on that keeps every window. While it lasts, the window's start
/// moves over the past: over a pause, what leaves the window is what comes in; between two, the time
/// held grows.
pause_budget::nanoseconds pause_budget::longest_from(time_point begin) const {
  auto start = begin - window_;
  auto still_in = nanoseconds::zero();
  for (auto const& pause : past_) {
    still_in += std::max(nanoseconds::zero(), pause.to - std::max(pause.from, start));
  }
  auto longest = nanoseconds::zero();
  for (auto const& pause : past_) {
    if (pause.to <= start) {
      continue;
    }
    auto const between = std::max(nanoseconds::zero(), pause.from - start);
    auto const room = allowed_ - still_in - longest;
    if (between > room) {
      return longest + std::max(nanoseconds::zero(), room);
    }
    auto const leaves = pause.to - std::max(pause.from, start);
    longest += between + leaves;
    still_in -= leaves;
    start = pause.to;
  }
  return allowed_;
}

/// The first instant from which a pause of that length keeps every window: at its end, what is left
/// of the past may fill the rest.
pause_budget::time_point pause_budget::first_with(nanoseconds length) const {
  auto room = allowed_ - length;
  for (auto number = past_.size(); number-- > 0;) {
    auto const& pause = past_[number];
    auto const took = pause.to - pause.from;
    if (took > room) {
      return pause.to - room + window_ - length;
    }
    room -= took;
  }
  return last_;
}

void pause_budget::forget_before(time_point start) {
  while (!past_.empty() && past_.front().to <= start) {
    past_.pop_front();
  }
}

void pause_budget::remember(interval pause) {
  if (pause.from == pause.to) {
    return;
  }
  if (!past_.empty() && past_.back().to == pause.from) {
    past_.back().to = pause.to;
    return;
  }
  past_.push_back(pause);
  if (past_.size() <= most_pauses) {
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

}  // namespace sluice::scheduler
