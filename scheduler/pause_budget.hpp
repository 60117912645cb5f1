/// How long training's launches may be held: whatever requests come, a share of time stays training's.
///
/// In every window of length W, wherever it begins, pauses take at most (1 − min_share) · W. The
/// budget remembers the pauses of the last W. One that begins at t may last until it and those that
/// are still in the window fill that time; pauses that leave the window meanwhile make room for it.
/// So the limit is exact, and a pause's end is known when it begins.
///
///   ready ──begin──► held ──end──► ready
///     │                └──end, at its limit──┐
///     └──begin, and nothing is left──────────┴──► used up ──an eighth of what a window may have──► ready
///
/// The last step keeps pauses from becoming ever shorter under load that never ends: after a used-up
/// budget the next one may last for at least that eighth.
///
///   pause_budget budget{0.2};   // of every second 200 ms stay training's
///   if (auto const limit = budget.begin(now); limit > now) {
///     // … hold launches, until `limit` at most …
///     budget.end(ended);
///   } else {
///     // … try again at budget.next_begin() …
///   }
///
/// Whole nanoseconds, so that sums are exact. Pure; one thread at a time. An instant that lies before
/// an earlier one's counts as that one. Bounded memory: of more than `most_pauses` in a window two
/// neighbours become one, with the time between them, which errs on training's side.
#pragma once

#include <chrono>
#include <cstddef>

#include "scheduler/detail/interval_window.hpp"

namespace sluice::scheduler {

class pause_budget {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using nanoseconds = std::chrono::nanoseconds;

  static constexpr std::chrono::seconds default_window{1};
  static constexpr std::size_t most_pauses = 512;

  /// Throws `std::invalid_argument` unless `min_share` is in [0, 1] and the window positive. With 0
  /// there is no limit, with 1 there are no pauses.
  explicit pause_budget(double min_share, nanoseconds window = default_window);

  /// A pause begins, if there may be one. Until when it may last; not later than `now` if there may
  /// be none, `time_point::max()` if it has no limit. While one is held, its limit again.
  [[nodiscard]] time_point begin(time_point now);
  /// The pause ends; what lies beyond its limit does not count. Without a pause nothing happens.
  void end(time_point now);

  /// The first instant at which `begin` would begin a pause, if none begins before; the past or the
  /// present if it would now, `time_point::max()` if it never will. Not while a pause is held.
  [[nodiscard]] time_point next_begin() const;

  [[nodiscard]] bool held() const noexcept { return held_; }
  /// How long launches have been held in the window before `now`.
  [[nodiscard]] nanoseconds held_in_window(time_point now) const;
  [[nodiscard]] nanoseconds window() const noexcept { return past_.length(); }

 private:
  [[nodiscard]] bool unlimited() const noexcept { return allowed_ == past_.length(); }

  detail::interval_window past_;  ///< pauses that have ended
  nanoseconds allowed_;           ///< of every window
  nanoseconds worthwhile_;        ///< what must be had before a used-up budget is ready again
  bool held_ = false;
  bool used_up_ = false;
  time_point begun_, limit_;  ///< of the pause that is held
  time_point last_;           ///< the latest instant that was heard of
};

}  // namespace sluice::scheduler
