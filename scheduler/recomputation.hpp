/// Chooses, for each micro-batch, whether training keeps its activations for backward or computes them again there.
///
/// Computing again (activation checkpointing) takes longer for each sample and needs less memory for it. Where the
/// micro-batch that the user wants fits, nothing is computed again. Where it does not, computing again allows more samples
/// at once, and whether those make up for what it costs depends on the model, the device and how much is missing. So both
/// are measured, the other way in a few micro-batches now and then, ever more seldom while that changes nothing, and the
/// one with more samples a second is kept. What is found counts for about as much memory. A fixed size is computed again
/// only where it does not fit otherwise.
///
///   recomputing_planner planner{{.largest = 64}, true};
///   while (remaining > 0) {
///     auto const [next, recompute] =
///         planner.plan({.remaining_samples = remaining, .arena_bytes = free_to_us});
///     if (next.wait) {
///       // … until next.needed_bytes are there …
///       continue;
///     }
///     // … run next.samples, computing activations again if `recompute` …
///     planner.committed(recompute, next.samples, bytes, took);  // or discarded(), out_of_memory()
///     remaining -= next.samples;
///   }
///
/// Plain numbers in and out. Pure: no clock. One thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "scheduler/batch_planner.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

class recomputing_planner {
 public:
  struct choice {
    batch_planner::slice next;
    bool recompute = false;
  };

  /// `offered`: whether training can compute again at all; else all is as the `batch_planner` has it. Throws as that.
  recomputing_planner(batch_planner::settings const& how, bool offered);

  [[nodiscard]] choice plan(batch_planner::input const& now);

  /// As of the `batch_planner`, with the way in which it ran.
  void committed(bool recomputed, std::uint64_t samples, std::uint64_t bytes, seconds took,
                 std::uint64_t at_first_bytes = 0);
  void discarded(std::uint64_t samples);
  void out_of_memory(bool recomputed, std::uint64_t samples, std::uint64_t arena_bytes);

 private:
  /// Of one way: with activations that are kept, or computed again.
  struct way {
    batch_planner planner;
    std::vector<double> rates{};   ///< the last ones where memory was short, in samples/s
    std::uint64_t first_size = 0;  ///< that has run; 0: none has
    bool has_several = false;      ///< sizes that tell what others need
  };
  /// Which way is the better one, for about as much memory.
  struct verdict {
    bool recompute = false;
    std::uint64_t until_trial = 0;  ///< micro-batches
    std::uint64_t interval = 0;     ///< of the last trial and the next
  };

  [[nodiscard]] way& at(bool recompute) noexcept { return ways_.at(recompute ? 1 : 0); }
  [[nodiscard]] bool is_enough(batch_planner::input const& now, batch_planner::slice const& plain);
  void extend(batch_planner::slice& again, std::uint64_t with_kept, std::uint64_t remaining);
  void find_verdict(std::uint64_t arena_bytes);
  void note_trial(std::uint64_t samples, double rate);
  void end_trial(bool other_is_better);

  batch_planner::settings settings_;
  bool offered_;
  std::array<way, 2> ways_;
  std::map<int, verdict> verdicts_;  ///< by the memory's order of magnitude
  int level_ = 0;
  bool short_ = false;  ///< of memory, when it was last planned
  bool tries_other_ = false;
  unsigned tries_ = 0;            ///< of the other way, in this trial
  std::uint64_t most_tried_ = 0;  ///< samples, likewise
};

}  // namespace sluice::scheduler
