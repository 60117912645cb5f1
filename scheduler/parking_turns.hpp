/// Whose turn it is: a job whose memory is parked again and again, for models that are asked for without end, has it for a
/// share of every window all the same, and is not parked so often that all the time goes into copying.
///
///   resident ──left──► away ──came_back──► resident, and stays
///
/// Two rules. *Stay*: a job that has come back is not parked for `stay` times as long as going and coming took, so that of any
/// length of time swaps take at most 1/(stay + 1); nor before it could be away for a while that is worth a swap
/// (`absence_in_swaps`). *Share*: in every window, wherever it begins, it is away for at most (1 − share) of it. So it is
/// known when a job leaves until when it has to be back, and a little before that its memory is *owed* to it.
///
///   parking_turns turns{{.share = 0.5, .window = 1min, .stay = 10}};
///   turns.left(now);
///   turns.owed_at(coming);         // from then on its memory is kept for it
///   turns.came_back(now, swap);    // going and coming, together
///   turns.stays_until();           // before that it is not parked
///
/// Whoever takes longer than that misses the promise (`missed`), and what the job was away for counts all the same: it stays
/// until the share is right again. Going and coming count as away.
///
/// Pure, exact in nanoseconds; one thread at a time. An instant that lies before an earlier one's counts as that one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "scheduler/detail/interval_window.hpp"

namespace sluice::scheduler {

struct turn_rules {
  double share = 0.0;  ///< of every window, in [0, 1]; 0: no such promise; 1: it is never parked
  std::chrono::nanoseconds window{std::chrono::minutes{1}};  ///< longer than 0
  std::uint32_t stay = 10;                                   ///< times what going and coming takes

  bool operator==(turn_rules const&) const = default;
};

class parking_turns {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using nanoseconds = std::chrono::nanoseconds;

  /// An absence is worth a swap if it lasts for so many of them. Coming is begun twice as long before the end as it takes
  /// (`owed_at`), so going and coming take up to two; as long again the memory is of use to others.
  static constexpr int absence_in_swaps = 4;
  static constexpr std::size_t most_absences = 512;

  /// Throws `std::invalid_argument` with the value unless the share is in [0, 1] and the window longer than 0.
  explicit parking_turns(turn_rules rules);
  /// From now on; an absence that has begun ends by the rules with which it began. Throws likewise.
  void revise(turn_rules rules);

  // --- a job that is resident
  /// The first instant at which it may be parked: the past if it may now, `time_point::max()` if it never may.
  [[nodiscard]] time_point stays_until() const;
  /// It is away from now on. `return_by`: it has to be back by then in any case. While it is away nothing happens.
  void left(time_point now, std::optional<time_point> return_by = std::nullopt);

  // --- one that is away; otherwise nothing happens
  /// Somebody of the job waits for its memory. Nobody misses what nobody wants.
  void wanted(time_point now);
  /// It has all back. `swap`: what going and coming took, together.
  void came_back(time_point now, nanoseconds swap);
  /// When its memory is owed to it, if coming takes `coming`: so long before it has to be back, and as long again, in which
  /// others give up what they have of it. Not before it left; `time_point::max()`: there is no bound.
  [[nodiscard]] time_point owed_at(nanoseconds coming) const;

  [[nodiscard]] bool is_away() const noexcept { return away_; }
  /// For how long it has been away in the window before `now`.
  [[nodiscard]] nanoseconds away_in_window(time_point now) const;
  [[nodiscard]] nanoseconds window() const noexcept { return past_.length(); }
  /// By how much it was back too late, in all: after it was due; or, if it wanted its memory later than that, later than a
  /// swap after it did.
  [[nodiscard]] nanoseconds missed() const noexcept { return missed_; }

 private:
  [[nodiscard]] nanoseconds allowed() const;

  turn_rules rules_;
  detail::interval_window past_;  ///< absences that have ended
  bool away_ = false;
  time_point left_at_{};
  time_point due_ = time_point::max();  ///< by then it has to be back
  std::optional<time_point> wanted_at_;
  std::optional<time_point> back_at_;  ///< the last time
  nanoseconds swap_{};                 ///< what that took
  nanoseconds missed_{};
  time_point last_ = time_point::min();  ///< the latest instant that was heard of
};

}  // namespace sluice::scheduler
