/// Whether requests come in bunches, one each period, and when the next one is expected.
///
/// What a timer sends comes at about the same distances: a request, or several in a bunch, earlier or later by some jitter; now and
/// then a bunch is left out, or one comes that belongs to no period. A bunch begins after a silence. Five lengths of silence are
/// tried at once, 1 s to 625 s, so that whatever is well within a bunch and well between two is told apart by one of them.
///
///   states:  nothing ──enough evidence──► found ──three left out in a row, or evidence gone──► nothing
///
/// Of a length of silence the last 24 bunches are looked at. The period is the slope of a line through those that are whole periods
/// apart, else the median of their distances; what they are off by is the jitter. It is believed only if bunches without any period
/// would lie so well on some grid once in 10⁸ times, by the binomial distribution, and if two of three are on it, and most of the last
/// four. Poisson processes, and those that come in bursts, do not.
///
///   period_estimator seen;
///   seen.count(now);                                 // a request came
///   if (auto const bunch = seen.next(now)) {
///     load_at = bunch->begins - load_time;           // the first request comes from then on
///   }
///
/// What it has seen outlives it, as plain numbers: whoever `recall`s them goes on with the same period, in the same phase. Of the time
/// in which nobody watched it is not known what came. So its periods count as neither kept nor left out, and windows are wider after
/// it, by the root of their number, as those of a timer that counts from the last time; a period of which nobody knows the phase any more
/// is given up.
///
/// Bounded: about a kilobyte. A request costs a few operations, and each fourth bunch a fit, of microseconds. Requests whose instants go
/// back count as simultaneous. One thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// What a period looks like, for who weighs whether it is worth following.
struct periodic_arrivals {
  seconds period{0.0};
  seconds margin{0.0};      ///< a bunch begins at most so much earlier or later than expected
  seconds quiet{0.0};       ///< within a bunch nobody comes for so long at most
  seconds span{0.0};        ///< from the first to the last of a bunch, on average
  double requests = 1.0;    ///< of a bunch, on average
  double unexpected = 0.0;  ///< share of bunches that begin at another time
  double left_out = 0.0;    ///< share of periods without a bunch

  [[nodiscard]] double requests_per_s() const noexcept {
    return requests * (1.0 - left_out) / std::max(1e-3, 1.0 - unexpected) / period.count();
  }
};

class period_estimator {
 public:
  static constexpr std::size_t remembered = 24;
  /// So many bunches may be left out in a row before the period counts as over.
  static constexpr std::int64_t patience = 3;

  void count(instant at) noexcept;

  [[nodiscard]] std::optional<periodic_arrivals> found(instant now) const noexcept;
  /// When a bunch is expected to begin.
  struct window {
    instant begins, ends;
  };
  /// The first one that is not over and whose bunch has not come; nothing where there is no period.
  [[nodiscard]] std::optional<window> next(instant now) const noexcept;
  /// When the period is over if nobody comes.
  [[nodiscard]] std::optional<instant> lapses() const noexcept;
  /// How often a period was found or lost.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }

  static constexpr std::size_t silences = 5;

  /// Bunches that a length of silence separates.
  struct kept_bunches {
    std::vector<double>
        begins{};  ///< the last ones, the oldest first, in seconds since the first request
    std::uint64_t number = 0;  ///< ever
    double in_last = 0.0;
    double requests = 1.0, span_s = 0.0;
    double longest_quiet_s = 0.0, longest_before_s = 0.0;
  };
  struct kept_finding {
    std::size_t silence = 0;
    double period_s = 0.0, margin_s = 0.0, next_s = 0.0;
    double bunches = 0.0, unexpected = 0.0;
    double periods = 0.0, left_out = 0.0;
  };
  struct kept_state {
    double now_s = 0.0;   ///< since the first request; before there was one nothing else counts
    double last_s = 0.0;  ///< of the last request
    std::vector<kept_bunches> by_silence{};  ///< none before the first request
    std::optional<kept_finding> found{};
  };
  [[nodiscard]] kept_state kept(instant now) const;
  /// Begins with what another one had seen `age` ago. Throws `std::invalid_argument` for what cannot have been seen.
  void recall(kept_state const& from, seconds age, instant now);

 private:
  /// Bunches that a length of silence separates.
  struct bunches {
    std::array<double, remembered> begins{};  ///< a ring, in seconds since the first request
    std::uint64_t number = 0;                 ///< ever
    double in_last = 0.0;                     ///< requests
    double requests = 1.0, span_s = 0.0;      ///< means of the last ones
    double longest_quiet_s = 0.0;             ///< of the present generation, and of the one before
    double longest_before_s = 0.0;

    void begin(double at_s, double last_s) noexcept;
    void go_on(double gap_s) noexcept;
  };
  struct fit {
    double period_s = 0.0;
    double margin_s = 0.0;  ///< a bunch begins so much earlier or later at most
    double next_s = 0.0;    ///< the middle of where the next one is expected
    std::size_t on_time = 0, all = 0;
    double periods = 0.0;  ///< from the first to the last
  };
  struct finding {
    std::size_t silence = 0;
    fit is{};
    double bunches = 0.0, unexpected = 0.0;  ///< decayed
    double periods = 0.0, left_out = 0.0;
  };

  [[nodiscard]] static std::optional<fit> fit_of(std::span<double const> begins,
                                                 double most_chance) noexcept;
  [[nodiscard]] static std::optional<fit> fit_of(bunches const& those, double most_chance) noexcept;
  static void check(kept_state const& from, seconds age);
  void look_at(std::size_t silence, double at_s) noexcept;
  void follow(double at_s) noexcept;
  void take(std::size_t silence, fit const& seen) noexcept;
  [[nodiscard]] periodic_arrivals described(finding const& of) const noexcept;
  [[nodiscard]] std::int64_t left_out_at(double now_s) const noexcept;
  [[nodiscard]] double seconds_at(instant now) const noexcept { return (now - first_).count(); }

  instant first_{};
  double last_s_ = 0.0;
  bool has_begun_ = false;
  std::array<bunches, silences> by_silence_{};
  std::optional<finding> found_;
  std::uint64_t changes_ = 0;
};

}  // namespace sluice::scheduler
