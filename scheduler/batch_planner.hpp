/// Cuts a global batch into micro-batches that fit the step arena, whose size changes while
/// training runs.
///
/// The planner learns bytes per sample and time per sample of this job from the micro-batches that
/// ran, and plans the largest micro-batch that fits. It halves after a discard or an out-of-memory,
/// and grows back by a quarter with each commit, no further than where doubling would gain less than
/// 2 % throughput. While nothing has been taken away and there is room, times count for nothing: the
/// batch is cut as it would be without a pool, and the same in every run. Remaining samples are spread
/// evenly, so the micro-batches of a step add up to the global batch exactly. It waits only on
/// evidence (the smallest micro-batch was measured to need more, or ran out of memory in as much),
/// never on an extrapolation: trying costs little, and a wrong estimate that forbids trying would never
/// be corrected. A size that has run in as much is tried in as much again.
///
///   batch_planner planner{{.largest = 64}};
///   while (remaining > 0) {
///     auto next = planner.plan({.remaining_samples = remaining, .arena_bytes = free_to_us});
///     if (next.wait) {
///       // … until next.needed_bytes are there …
///       continue;
///     }
///     // … run next.samples …
///     planner.committed(next.samples, bytes, took);   // or discarded(), or out_of_memory()
///     remaining -= next.samples;
///   }
///
/// Plain numbers in and out. Pure: no clock. One thread at a time.
/// Source of the fit: Theil (1950), Sen, JASA 63 (1968): the median of pairwise slopes, which one
/// disturbed measurement does not move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// y ≈ base + slope · samples, both ≥ 0.
struct linear_cost {
  double base = 0.0;
  double slope = 0.0;

  [[nodiscard]] double at(std::uint64_t samples) const noexcept {
    return base + slope * static_cast<double>(samples);
  }
};

/// Measurements of one cost by micro-batch size: the last five of each of the sixteen sizes used
/// last.
class cost_model {
 public:
  struct point {
    std::uint64_t samples = 0;
    std::vector<double> values{};
    std::uint64_t last_used = 0;
  };

  void add(std::uint64_t samples, double value);
  /// Forgets sizes that were not among the last `uses` that were added.
  void forget_older(std::uint64_t uses);
  [[nodiscard]] std::vector<point> const& points() const noexcept { return points_; }
  /// Through the medians. With one size only: proportional (base 0), which errs on the large side
  /// for larger sizes.
  [[nodiscard]] linear_cost typical() const;
  /// Slope of the largest values, base raised until none lies above: for what must not be exceeded.
  [[nodiscard]] linear_cost envelope() const;

 private:
  std::vector<point> points_;
  std::uint64_t uses_ = 0;
};

class batch_planner {
 public:
  struct settings {
    std::uint64_t largest = 1;  ///< the user's micro-batch: never exceeded, and tried first
    /// Always `largest` (and a remainder): for models whose result depends on the cut.
    bool fixed = false;
  };
  struct input {
    std::uint64_t remaining_samples = 0;  ///< of the global batch, not yet committed
    std::uint64_t arena_bytes = 0;        ///< that the next micro-batch may use
  };
  struct slice {
    std::uint64_t samples = 0;      ///< 0 when waiting, or when nothing remains
    std::uint64_t slices_left = 0;  ///< into which the remaining samples are cut, this one included
    bool wait = false;              ///< not even the smallest permitted micro-batch fits
    /// Predicted need of `samples` with its margin; or what is waited for.
    std::uint64_t needed_bytes = 0;
  };

  /// Throws `std::invalid_argument` if `largest` is 0.
  explicit batch_planner(settings const& how);

  [[nodiscard]] slice plan(input const& now) const;

  /// A micro-batch ran in so many bytes of the arena and counts; `took` without time spent paused. `at_first_bytes`, if it is
  /// more, is what so many samples took before it was known how their tensors lie best: so does another size.
  void committed(std::uint64_t samples, std::uint64_t bytes, seconds took,
                 std::uint64_t at_first_bytes = 0);
  /// One of another kind, which is planned for elsewhere, ran and counts.
  void other_committed() noexcept { grow_back(); }
  /// Its memory was taken away.
  void discarded(std::uint64_t samples);
  /// It did not fit into `arena_bytes`.
  void out_of_memory(std::uint64_t samples, std::uint64_t arena_bytes);

  [[nodiscard]] linear_cost bytes_per_micro_batch() const { return memory_.envelope(); }
  [[nodiscard]] linear_cost seconds_per_micro_batch() const { return time_.typical(); }

 private:
  struct shortage {
    std::uint64_t samples = 0;  // 0: none remembered
    std::uint64_t arena_bytes = 0;
    // After which it is forgotten, since fragmentation may have been its cause.
    unsigned commits_left = 0;
  };

  [[nodiscard]] std::uint64_t where_growth_ends() const;
  [[nodiscard]] std::uint64_t has_run_in(std::uint64_t samples) const;
  [[nodiscard]] std::uint64_t largest_that_ran_in(std::uint64_t arena_bytes) const;
  [[nodiscard]] std::uint64_t worth_trying_again() const;
  [[nodiscard]] std::uint64_t least_known_need(std::uint64_t samples) const;
  void shrink_below(std::uint64_t samples) noexcept;
  void grow_back() noexcept;

  settings settings_;
  std::uint64_t limit_;  // after discards; equals settings_.largest when all is calm
  shortage shortage_;
  cost_model memory_;  // at first
  cost_model ran_in_;
  cost_model time_;
};

}  // namespace sluice::scheduler
