#include "scheduler/parking_turns.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace sluice::scheduler {
namespace {

turn_rules checked(turn_rules rules) {
  if (!(rules.share >= 0.0 && rules.share <= 1.0)) {
    throw std::invalid_argument("the resident share must be in [0, 1]; got " +
                                std::to_string(rules.share));
  }
  if (rules.window <= std::chrono::nanoseconds::zero()) {
    throw std::invalid_argument("the window must be longer than 0 ns; got " +
                                std::to_string(rules.window.count()));
  }
  return rules;
}

}  // namespace

parking_turns::parking_turns(turn_rules rules)
    : rules_(checked(rules)), past_(rules.window, most_absences) {}

void parking_turns::revise(turn_rules rules) {
  rules_ = checked(rules);
  past_.set_length(rules.window);
}

/// How long it may be away of every window.
parking_turns::nanoseconds parking_turns::allowed() const {
  auto const kept = std::ceil(rules_.share * static_cast<double>(rules_.window.count()));
  return rules_.window - std::min(rules_.window, nanoseconds{static_cast<nanoseconds::rep>(kept)});
}

parking_turns::time_point parking_turns::stays_until() const {
  auto const most = allowed();
  if (most == nanoseconds::zero()) {
    return time_point::max();
  }
  if (!back_at_) {
    return time_point::min();
  }
  auto const after_swap = *back_at_ + rules_.stay * swap_;
  if (most == rules_.window) {
    return after_swap;
  }
  // One that takes longer than it may ever be away is not refused for good: it has its share, less what the swap takes.
  auto const worthwhile = std::clamp(absence_in_swaps * swap_, nanoseconds{1}, most);
  return std::max(after_swap, past_.first_with(worthwhile, most));
}

void parking_turns::left(time_point now, std::optional<time_point> return_by) {
  last_ = std::max(last_, now);
  if (std::exchange(away_, true)) {
    return;
  }
  left_at_ = last_;
  wanted_at_.reset();
  past_.forget_before(last_);
  auto const most = allowed();
  due_ = most == rules_.window ? time_point::max() : last_ + past_.longest_from(last_, most);
  due_ = std::min(due_, return_by.value_or(time_point::max()));
}

void parking_turns::wanted(time_point now) {
  last_ = std::max(last_, now);
  if (away_ && !wanted_at_) {
    wanted_at_ = last_;
  }
}

void parking_turns::came_back(time_point now, nanoseconds swap) {
  last_ = std::max(last_, now);
  if (!std::exchange(away_, false)) {
    return;
  }
  if (wanted_at_ && due_ != time_point::max()) {
    missed_ += std::max(nanoseconds::zero(), last_ - std::max(due_, *wanted_at_ + swap));
  }
  past_.add({left_at_, last_});
  back_at_ = last_;
  swap_ = std::max(swap, nanoseconds::zero());
  due_ = time_point::max();
}

parking_turns::time_point parking_turns::owed_at(nanoseconds coming) const {
  return due_ == time_point::max() ? due_ : std::max(left_at_, due_ - 2 * coming);
}

parking_turns::nanoseconds parking_turns::away_in_window(time_point now) const {
  return past_.within(now) + (away_ ? past_.part_of({left_at_, now}, now) : nanoseconds::zero());
}

}  // namespace sluice::scheduler
