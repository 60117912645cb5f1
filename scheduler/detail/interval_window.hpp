/// What something was in the last of a sliding window: intervals of time, and how long the next one may be so that in no
/// window, wherever it begins, they take more than is allowed.
///
///   interval_window held{1s, 512};
///   auto const longest = held.longest_from(now, 800ms);   // in every window at most 800 ms
///   held.add({now, now + longest});
///   held.first_with(100ms, 800ms);   // when there is room for 100 ms again
///
/// Whole nanoseconds, so that sums are exact. Bounded memory: of more than `most` intervals two neighbours become one, with
/// the time between them, which counts too much and never too little.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>

namespace sluice::scheduler::detail {

struct interval {
  std::chrono::steady_clock::time_point from, to;
};

class interval_window {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using nanoseconds = std::chrono::nanoseconds;

  /// `length` of the window is positive.
  interval_window(nanoseconds length, std::size_t most) : length_(length), most_(most) {}

  [[nodiscard]] nanoseconds length() const noexcept { return length_; }
  /// Of a longer one what has been forgotten is missing.
  void set_length(nanoseconds length) noexcept { length_ = length; }

  /// What has ended. Not before the end of the last one; of no length, nothing happens.
  void add(interval ended);
  /// Intervals that have left the window which ends at `now` count no more.
  void forget_before(time_point now);

  /// What of the window that ends at `now` is in the intervals.
  [[nodiscard]] nanoseconds within(time_point now) const;
  /// What of `one` is in the window that ends at `now`.
  [[nodiscard]] nanoseconds part_of(interval const& one, time_point now) const;
  /// The longest interval from `begin` on with which no window has more than `allowed`. Zero if there is none; `allowed`
  /// again if the past is no hindrance.
  [[nodiscard]] nanoseconds longest_from(time_point begin, nanoseconds allowed) const;
  /// The first instant, not before the end of the last interval, from which one of `length` leaves no window with more than
  /// `allowed`; `length` is not more than that. Nothing stands in the way: `time_point::min()`.
  [[nodiscard]] time_point first_with(nanoseconds length, nanoseconds allowed) const;

 private:
  nanoseconds length_;
  std::size_t most_;
  std::deque<interval> past_;  ///< by time, without overlap
};

}  // namespace sluice::scheduler::detail
