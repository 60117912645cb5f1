/// Holds the predicted share of requests in time against what comes of them, and corrects it where it stays wrong.
///
/// A prediction has an interval: what the observed share varies by, had it been right. That is more than requests which do not
/// depend on each other would vary by, since misses come in clusters: the sums of a tenth of the window each say how much. Where
/// the observed share lies outside, the prediction is corrected by what is added to its log odds, log(p/(1 − p)), so that it
/// meets what was observed; the correction follows the last window, and is dropped when the prediction by itself is well inside
/// again.
///
///   calibration seen{5min};
///   seen.add(1s, 20, 11, 0.99);   // of 20 in a second 11 were in time, 0.99 had been predicted
///   seen.corrected(0.99);         // what to predict now where the model says 0.99
///
/// Between the shares 0.02 and 0.98 this is a shift of the log odds; beyond, where those go to infinity, of the share by as much
/// as there. It never changes the order of two predictions. One thread at a time.
#pragma once

#include <cstdint>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// `share` with so much added to its log odds; 0: as it is.
[[nodiscard]] double corrected_share(double share, double log_odds) noexcept;
/// The least share that is corrected to `wanted` at least; more than 1 if there is none.
[[nodiscard]] double uncorrected_share(double wanted, double log_odds) noexcept;

class calibration {
 public:
  /// `window`: after which a request counts for e times less. Throws `std::invalid_argument` unless it is positive and finite.
  explicit calibration(seconds window);

  /// In the last `passed`, of `requests` that were predicted to be in time with `predicted`, `within` were.
  void add(seconds passed, std::uint64_t requests, std::uint64_t within, double predicted) noexcept;

  /// In force: 0 as long as the prediction is right.
  [[nodiscard]] double log_odds() const noexcept {
    return state_.is_correcting ? state_.fitted : 0.0;
  }
  [[nodiscard]] double corrected(double share) const noexcept {
    return corrected_share(share, log_odds());
  }
  /// Half of the width of the interval around the prediction, as a share; 1 before enough is known.
  [[nodiscard]] double half_width() const noexcept;

  /// What it goes by, for another one of the same window.
  struct kept_state {
    double requests = 0.0;  ///< decayed sums
    double over = 0.0;      ///< in time beyond what was predicted
    double chance = 0.0;    ///< variance of that, were requests independent
    double clusters = 0.0;  ///< the same by batches
    double batch_s = 0.0;
    double batch_over = 0.0;
    double fitted = 0.0;
    double information = 0.0;
    bool is_correcting = false;
  };
  [[nodiscard]] kept_state const& kept() const noexcept { return state_; }
  /// Nothing has come of predictions in the `age` since. Throws `std::invalid_argument` for what cannot have been learnt.
  void recall(kept_state const& from, seconds age);

 private:
  void close_batch() noexcept;
  [[nodiscard]] double deviation() const noexcept;

  double window_s_;
  kept_state state_{};
};

}  // namespace sluice::scheduler
