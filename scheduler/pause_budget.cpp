#include "scheduler/pause_budget.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

constexpr int worthwhile_divisor = 8;

}  // namespace

pause_budget::pause_budget(double min_share, nanoseconds window) : past_(window, most_pauses) {
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
  past_.forget_before(last_);
  if (unlimited()) {
    limit_ = time_point::max();
  } else {
    auto const longest = past_.longest_from(last_, allowed_);
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
  past_.add({begun_, std::min(last_, limit_)});
}

pause_budget::time_point pause_budget::next_begin() const {
  if (unlimited()) {
    return last_;
  }
  if (allowed_ == nanoseconds::zero()) {
    return time_point::max();
  }
  auto const first = past_.first_with(used_up_ ? worthwhile_ : nanoseconds{1}, allowed_);
  return first == time_point::min() ? last_ : first;
}

pause_budget::nanoseconds pause_budget::held_in_window(time_point now) const {
  return past_.within(now) + (held_ ? past_.part_of({begun_, limit_}, now) : nanoseconds::zero());
}

}  // namespace sluice::scheduler
