/// Predicts when a stream will have done what it was given, so that it is given only so much at a
/// time.
///
/// The clock moves the prediction on; events between the launches correct it. An event that happened
/// early or is late shifts everything behind it by as much:
///
///   launched   ── 40 µs ── 25 µs ── [event] ── 60 µs ── 30 µs ── [event] ── 20 µs
///                                                                               ▲ end()
///
/// The first launch that has not ended is the unit that is executing; what lies behind it is what a
/// pause would wait for besides. What stands between two events is a group. A launch that is long, or
/// that is to be measured, is a group of its own: then the event tells when it ended, and the two
/// around it how long it took.
///
/// Measured alone a launch takes longer than among others, by the events and by what the device does
/// of two launches at once. By how much is learned from whole groups: those whose events were seen
/// to happen, by somebody who was waiting for room, and before whose launches the device never ran
/// empty.
///
/// Pure: it takes the time and the news as arguments, and calls no driver. Times are CLOCK_MONOTONIC
/// nanoseconds. Thread-safety: none.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>

#include "runtime/gate/durations.hpp"

namespace sluice::gate {

/// An event between groups. The caller owns what `event` stands for.
struct group_marker {
  void* event = nullptr;
  std::int64_t end_ns = 0;       ///< when the group before it is predicted to be done
  bool alone = false;            ///< the group is one launch
  work_key measures = 0;         ///< the kind of that launch, if it is to be learned
  work_key in_context = 0;       ///< and what it is known as behind the launches before it
  bool timed = false;            ///< the event knows when it happened
  unsigned launches = 0;         ///< in the group
  std::int64_t measured_ns = 0;  ///< that they take together, by what was measured of each alone
  bool unbroken = false;         ///< the device had something to do when each of them came
  std::int64_t asked_ns = 0;     ///< when it was last seen not to have happened
};

class run_ahead {
 public:
  using nanoseconds = std::chrono::nanoseconds;

  /// When all that was launched is predicted to be done.
  [[nodiscard]] std::int64_t end() const noexcept { return end_ns_; }
  /// Whether work that takes so long may follow: with it no more than `bound` waits behind the unit
  /// that is executing, or nothing does and that unit is about to end. So what is longer than the
  /// bound is given to the device alone, just in time; the earlier, the less it is longer.
  [[nodiscard]] bool has_room(std::int64_t now, nanoseconds takes, nanoseconds bound) noexcept;
  /// The oldest marker that has not been seen to have happened; nullptr if there is none.
  [[nodiscard]] group_marker const* oldest() const noexcept {
    return markers_.empty() ? nullptr : &markers_.front();
  }
  /// Whether asking for the oldest marker is worth it: it should have happened by now, or there is
  /// no room without its having happened early.
  [[nodiscard]] bool should_ask(std::int64_t now, nanoseconds takes, nanoseconds bound) noexcept;

  /// The oldest marker has happened. Returns it: it is no longer among ours.
  group_marker completed(std::int64_t now);
  /// The oldest marker has not happened yet.
  void is_late(std::int64_t now) noexcept;

  /// Whether an event stands behind the last launch.
  [[nodiscard]] bool ends_with_marker() const noexcept { return unmarked_ == 0; }
  /// Whether one launch stands behind the last event.
  [[nodiscard]] bool is_alone() const noexcept { return unmarked_ == 1; }
  /// Notes a launch that the driver has just taken.
  void launched(std::int64_t now, nanoseconds takes) noexcept;
  /// Work launched since the last event.
  [[nodiscard]] nanoseconds unmarked_work() const noexcept { return unmarked_work_; }
  /// An event has been recorded behind what was launched last.
  void marked(std::int64_t now, group_marker const& by);
  /// No event could be recorded: what was launched may not have gone to the device at all.
  void forget_unmarked(std::int64_t now) noexcept;

  /// Nothing is outstanding. Returns the next of the markers that were; nothing when all are given
  /// back.
  [[nodiscard]] std::optional<group_marker> clear() noexcept;
  /// What a launch among others takes more, or less, than alone.
  [[nodiscard]] nanoseconds correction() const noexcept { return correction_; }

 private:
  void shift(std::int64_t by) noexcept;
  void begin_group() noexcept;
  void learn(group_marker const& from, std::int64_t took) noexcept;
  [[nodiscard]] nanoseconds corrected(nanoseconds takes) const noexcept;

  std::deque<group_marker> markers_;
  std::deque<std::int64_t> unit_ends_;  // of launches that have not ended yet, less `shifted_ns_`
  std::int64_t shifted_ns_ = 0;         // by which all of them have moved
  std::int64_t end_ns_ = 0;
  nanoseconds unmarked_work_{};
  std::int64_t unmarked_measured_ns_ = 0;  // the same without the correction
  unsigned unmarked_ = 0;                  // launches since the last event
  bool unbroken_ = true;
  std::int64_t seen_ns_ = 0;  // when the last event was seen to happen; 0: it was found so later
  double error_ns_ = 0;       // of predicted groups, and their launches; what is old fades away
  double launches_ = 0;
  nanoseconds correction_{};
};

}  // namespace sluice::gate
