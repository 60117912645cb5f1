/// What the scheduler learns while requests pass: arrival rates, idle gaps, burstiness, durations,
/// kept promises.
///
/// Each estimator takes the instants of events from its caller, uses bounded memory, and is as
/// cheap per event as a few floating-point operations. An event whose instant lies before an
/// earlier one's counts as simultaneous with it, so that threads which report slightly out of order
/// do no harm.
///
///   arrival_rates rates{start};
///   rates.count(now);
///   rates.slow(now);   // per second, decayed up to `now`
///
/// What one has learnt is a value (`kept`) that another one can begin with (`recall`), some time later: what was seen counts for less
/// by then, and the time in between for nothing, since nobody was watching.
///
///   arrival_rates next{now};
///   next.recall(rates.kept(now), 30s, now);
///
/// None is thread-safe: one thread at a time. Durations that are negative or not finite throw
/// `std::invalid_argument`, as does `recall` of what cannot have been learnt; longer ones than 10⁹ s count as that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "scheduler/distribution.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// Events per second, the past forgotten exponentially. Of a Poisson stream of rate λ the estimate
/// varies by 1/√(2λτ) relative, τ the time constant.
class decayed_rate {
 public:
  decayed_rate(seconds time_constant, instant start);
  void count(instant at) noexcept;
  /// Decayed up to `now`, and corrected for having watched only since `start`. 0 before the first
  /// event.
  [[nodiscard]] double per_second(instant now) const noexcept;
  [[nodiscard]] seconds time_constant() const noexcept { return seconds{time_constant_}; }

  struct kept_state {
    double events = 0.0;   ///< Σ e^{−age/τ}
    double watched = 0.0;  ///< what that would be at most of a stream of rate 1/τ: 1 after long
  };
  [[nodiscard]] kept_state kept(instant now) const noexcept;
  void recall(kept_state const& from, seconds age, instant now);

 private:
  [[nodiscard]] double watched(instant now) const noexcept;

  double time_constant_;
  instant start_;
  instant last_;
  double sum_ = 0.0;             // Σ e^{−(last − event)/τ}
  double watched_before_ = 0.0;  // at the start
};

/// A fast and a slow estimate of the same stream.
class arrival_rates {
 public:
  explicit arrival_rates(instant start, seconds fast = seconds{10.0},
                         seconds slow = seconds{120.0});
  void count(instant at) noexcept;
  [[nodiscard]] double fast(instant now) const noexcept { return fast_.per_second(now); }
  [[nodiscard]] double slow(instant now) const noexcept { return slow_.per_second(now); }
  /// The slow estimate, except when the fast one is more than twice as high, and by more than its noise: then traffic is
  /// really rising.
  [[nodiscard]] double planned(instant now) const noexcept;
  /// Time constants.
  [[nodiscard]] seconds fast_memory() const noexcept { return fast_.time_constant(); }
  [[nodiscard]] seconds slow_memory() const noexcept { return slow_.time_constant(); }

  struct kept_state {
    decayed_rate::kept_state fast{}, slow{};
  };
  [[nodiscard]] kept_state kept(instant now) const noexcept {
    return {fast_.kept(now), slow_.kept(now)};
  }
  void recall(kept_state const& from, seconds age, instant now);

 private:
  decayed_rate fast_;
  decayed_rate slow_;
};

/// P(gap > T) as observed, in logarithmic bins (four per octave from 1 ms to 37 h); a gap's weight
/// halves every 700 newer ones. Poisson arrivals are the prior, worth `prior_gaps` observations.
class gap_histogram {
  static constexpr std::size_t bins = 110;
  struct bin {
    double count = 0.0;
    double total_s = 0.0;
  };

 public:
  static constexpr double prior_gaps = 30.0;

  struct release_odds {
    double exceed = 0.0;  ///< P(gap > timeout)
    /// E[(gap − timeout)+] / E[gap]: share of the idle time; equals `exceed` for Poisson.
    double time_share = 0.0;
  };

  void add(seconds gap);
  /// Neither rises with the timeout. `rate_per_s` is the stream's present rate, which the prior
  /// takes.
  [[nodiscard]] release_odds beyond(seconds timeout, double rate_per_s) const noexcept {
    return summed().beyond(timeout, rate_per_s);
  }
  /// As it is now, to be asked for many timeouts: each question is then independent of the number of bins.
  class sums {
   public:
    [[nodiscard]] release_odds beyond(seconds timeout, double rate_per_s) const noexcept;

   private:
    friend class gap_histogram;
    std::array<bin, bins> at_{};
    std::array<bin, bins + 1> from_{};  ///< of a bin and all beyond
  };
  [[nodiscard]] sums summed() const noexcept;
  /// Observations, the forgotten part taken off.
  [[nodiscard]] double weight() const noexcept;
  /// Of those observations; none before there are as many as the prior is worth.
  [[nodiscard]] std::optional<double> mean_rate_per_s() const noexcept;

  struct kept_bin {
    std::size_t bin = 0;
    double weight = 0.0;  ///< the newest gap has 1
    double total_s = 0.0;
  };
  /// Those that are not empty.
  using kept_state = std::vector<kept_bin>;
  [[nodiscard]] kept_state kept() const;
  /// A day later they count for e times less.
  void recall(kept_state const& from, seconds age);

 private:
  std::array<bin, bins> bins_{};
  // Weight of the newest gap; grows instead of decaying every bin at every event.
  double unit_ = 1.0;
};

/// Index of dispersion for counts: Var N(w) / E N(w) over consecutive windows of length w. 1 for
/// Poisson arrivals, above 2 in bursts that matter at that time scale.
class dispersion_index {
 public:
  static constexpr double needed_windows = 30.0;

  dispersion_index(seconds window, instant start);
  void count(instant at) noexcept;
  /// Nothing until `needed_windows` windows have passed and one of them had an arrival.
  [[nodiscard]] std::optional<double> value(instant now) noexcept;
  [[nodiscard]] seconds window() const noexcept { return seconds{window_}; }

  /// Of windows that have passed.
  struct kept_state {
    double closed = 0.0;                               ///< ever
    double weight = 0.0, sum = 0.0, square_sum = 0.0;  ///< the newest one has the weight 1
  };
  [[nodiscard]] kept_state kept(instant now) noexcept;
  void recall(kept_state const& from, seconds age, instant now);

 private:
  void close_windows(instant now) noexcept;

  double window_;
  instant begin_;  // of the open window
  double open_count_ = 0.0;
  double closed_ = 0.0;   // windows, ever
  double windows_ = 0.0;  // sums over closed windows, decayed
  double sum_ = 0.0;
  double square_sum_ = 0.0;
};

/// A duration known beforehand only roughly.
struct duration_prior {
  seconds mean{0.0};
  double scv = 1.0;
};

/// What a load copies for all of a model's weights, from loads before which parts of them had stayed: the slope of the line by least squares
/// through their times, beyond what a load takes whatever there is to copy. As long as all have copied the same share the line goes through
/// the origin.
class copy_time {
 public:
  /// `copied_share` in (0, 1]; `load`: without what memory took to arrive.
  void add(double copied_share, seconds load) noexcept;
  /// Between 0 and what the origin's line says; none before the first load.
  [[nodiscard]] std::optional<seconds> of_all() const noexcept;

 private:
  double loads_ = 0.0;
  double shares_ = 0.0, times_ = 0.0;  ///< sums
  double squares_ = 0.0, products_ = 0.0;
};

/// The last `capacity` durations of one kind, and their distribution. A load is one kind, a service without
/// its load another.
class duration_window {
 public:
  static constexpr std::size_t capacity = 256;
  static constexpr std::size_t enough = 30;

  explicit duration_window(duration_prior prior);
  void add(seconds duration);
  /// From `enough` samples on, the samples. Before, a gamma distribution with the prior's scv, whose mean
  /// counts the prior as three samples: a mean is learned from few, a shape is not.
  [[nodiscard]] distribution estimate() const;
  /// Samples ever added.
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] bool measured() const noexcept { return samples_.size() >= enough; }
  /// Of the samples that are kept; 0 without one.
  [[nodiscard]] seconds mean() const noexcept;
  /// Standard deviation of that.
  [[nodiscard]] seconds mean_deviation() const noexcept;

  /// The samples, the oldest first, in seconds.
  using kept_state = std::vector<double>;
  [[nodiscard]] kept_state kept() const;
  /// A day later e times fewer of them, the newest ones. `count` is of what is added here.
  void recall(kept_state const& from, seconds age);

 private:
  void sum_anew() noexcept;

  duration_prior prior_;
  std::vector<double> samples_;
  std::size_t next_ = 0;
  std::uint64_t count_ = 0;
  double sum_ = 0.0;  // of the samples, and of their squares
  double square_sum_ = 0.0;
};

/// The share of requests that kept the promised latency, over a sliding window (kept in 60 slices).
class attainment_window {
 public:
  struct observation {
    std::uint64_t requests = 0;
    std::uint64_t within = 0;
    /// Nothing when there was no request.
    [[nodiscard]] std::optional<double> share() const noexcept;
  };

  attainment_window(seconds length, instant start);
  void add(instant at, bool within) noexcept;
  [[nodiscard]] observation read(instant now) noexcept;

  struct kept_state {
    double slice_s = 0.0;           ///< the length of a slice
    double into_s = 0.0;            ///< of that, has passed of the newest
    std::vector<observation> seen;  ///< by slice, the newest first
  };
  [[nodiscard]] kept_state kept(instant now);
  /// Only of a window of the same length is anything kept.
  void recall(kept_state const& from, seconds age, instant now);

 private:
  static constexpr std::int64_t slices = 60;
  void advance(instant now) noexcept;

  double slice_s_;
  instant start_;
  std::int64_t newest_ = 0;  // number of the slice that `now` falls into
  std::array<observation, static_cast<std::size_t>(slices)> ring_{};
};

}  // namespace sluice::scheduler
