/// How often a model has ended the process that computed it, and whether it is tried again.
///
///   healthy ──third offence in five minutes──► failed ──back-off──► on trial ──offence──► failed, for twice as long
///      ▲                                                               │
///      └──────────────────────── an answer ────────────────────────────┘
///
/// Pure: the caller has the clock. Not thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>

namespace sluice::server {

class model_health {
 public:
  using clock = std::chrono::steady_clock;
  static constexpr std::size_t offences_that_fail = 3;
  static constexpr std::chrono::minutes window{5};
  static constexpr std::chrono::seconds first_back_off{1};
  static constexpr std::chrono::minutes longest_back_off{5};

  void on_offence(clock::time_point now) {
    ++offences_;
    recent_.push_back(now);
    forget_before(now - window);
    if (on_trial_ || recent_.size() >= offences_that_fail) {
      back_off_ = std::min<clock::duration>(
          back_off_ == clock::duration::zero() ? first_back_off : 2 * back_off_, longest_back_off);
      failed_until_ = now + back_off_;
      on_trial_ = true;
    }
  }

  /// The model has computed something to its end.
  void on_answer() {
    if (on_trial_) {
      on_trial_ = false;
      back_off_ = clock::duration::zero();
      recent_.clear();
    }
  }

  /// How long it is not tried; 0: it is.
  [[nodiscard]] clock::duration failed_for(clock::time_point now) const {
    return std::max(failed_until_ - now, clock::duration::zero());
  }
  [[nodiscard]] std::size_t offences() const noexcept { return offences_; }

 private:
  void forget_before(clock::time_point then) {
    while (!recent_.empty() && recent_.front() < then) {
      recent_.pop_front();
    }
  }

  std::deque<clock::time_point> recent_;
  std::size_t offences_ = 0;  ///< in all
  clock::duration back_off_{};
  clock::time_point failed_until_{};
  bool on_trial_ = false;
};

}  // namespace sluice::server
