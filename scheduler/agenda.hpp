/// Which of many models need a new decision: those with news, and those whose last decision was made for a time that is over.
///
/// A decision costs tens of microseconds, and most models have nothing new from one second to the next; so a tick looks at none
/// of the others.
///
///   agenda due{models};
///   due.want(7);                       // an event has changed what its decision rests on
///   due.want_at(8, now + 30s);         // even if it hears nothing until then
///   due.take(now, [&](std::size_t model) { due.want_at(model, decide(model)); });
///
/// Bounded by the number of models: 21 bytes each. One thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

class agenda {
 public:
  /// Models are numbers below `models`; none is wanted.
  explicit agenda(std::size_t models) : places_(models, nowhere), is_wanted_(models, 0) {}

  [[nodiscard]] std::size_t size() const noexcept { return places_.size(); }
  /// At the next `take`.
  void want(std::size_t model);
  /// At the first `take` from then on, in place of the time that was said before. `instant::max()`: not before there is news.
  void want_at(std::size_t model, instant when);

  /// Calls `decide` with each model that is due, once, those that were wanted first in the order of that; returns how many
  /// those were. What `decide` wants is for the next time.
  template <typename Decide>
  std::size_t take(instant now, Decide const& decide) {
    due_.swap(wanted_);
    for (auto const model : due_) {
      is_wanted_[model] = 0;
      forget_time(model);
    }
    while (!times_.empty() && times_.front().when <= now) {
      due_.push_back(times_.front().model);
      forget_time(times_.front().model);
    }
    for (auto const model : due_) {
      decide(static_cast<std::size_t>(model));
    }
    auto const count = due_.size();
    due_.clear();
    return count;
  }

 private:
  static constexpr std::uint32_t nowhere = std::numeric_limits<std::uint32_t>::max();
  struct timed {
    instant when;
    std::uint32_t model;
  };

  void forget_time(std::size_t model);
  void sift(std::size_t place);
  void put(std::size_t place, timed const& what);

  std::vector<timed> times_;  // a heap, the earliest in front
  std::vector<std::uint32_t> places_;
  std::vector<std::uint8_t> is_wanted_;
  std::vector<std::uint32_t> wanted_;
  std::vector<std::uint32_t> due_;
};

}  // namespace sluice::scheduler
