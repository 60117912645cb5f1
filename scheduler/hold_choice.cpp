#include "scheduler/hold_choice.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {

hold_choice::hold_choice(nanoseconds change) : change_(change), hold_(change) {
  if (change <= nanoseconds::zero()) {
    throw std::invalid_argument("a change takes longer than 0 ns; got " +
                                std::to_string(change.count()));
  }
  sorted_.reserve(remembered + 1);
}

void hold_choice::add(nanoseconds gap) {
  gap = std::max(gap, nanoseconds::zero());
  gaps_.push_back(gap);
  sorted_.insert(std::upper_bound(sorted_.begin(), sorted_.end(), gap), gap);
  if (gaps_.size() > remembered) {
    sorted_.erase(std::lower_bound(sorted_.begin(), sorted_.end(), gaps_.front()));
    gaps_.pop_front();
  }
  hold_ = cheapest();
}

/// Only the lengths of gaps come into question, and none. What is longer than a change and its cost is not worth looking
/// at either, since such a gap alone costs more than letting go; the sums below then do not overflow.
hold_choice::nanoseconds hold_choice::cheapest() const {
  auto const all = static_cast<nanoseconds::rep>(sorted_.size());
  auto best = nanoseconds::zero();
  auto least = all * change_;
  auto held_through = nanoseconds::zero();
  nanoseconds::rep number = 0;
  for (auto const gap : sorted_) {
    if (gap > 2 * change_) {
      break;
    }
    held_through += gap;
    ++number;
    auto const cost = held_through + (all - number) * (gap + change_);
    if (cost < least) {
      least = cost;
      best = gap;
    }
  }
  return best;
}

}  // namespace sluice::scheduler
