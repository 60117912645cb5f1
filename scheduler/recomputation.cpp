#include "scheduler/recomputation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sluice::scheduler {
namespace {

/// How many micro-batches of either way are compared; the fastest counts, since what disturbs one makes it slower.
constexpr std::size_t rates_compared = 2;
/// After so many the other way is judged, whether or not its size has become steady; it may run out of memory as often.
constexpr unsigned most_tries = 8;
/// Micro-batches between two trials: at first, and after ever more that have changed nothing.
constexpr std::uint64_t first_interval = 32;
constexpr std::uint64_t longest_interval = 2048;
/// What the other way has to gain.
constexpr double least_gain_of_change = 0.02;
/// Amounts of memory that differ by less are one.
constexpr double level_ratio = 1.25;

int level_of(std::uint64_t bytes) {
  return static_cast<int>(std::log(static_cast<double>(std::max<std::uint64_t>(1, bytes))) /
                          std::log(level_ratio));
}

/// Whether a size has hardly grown.
bool is_near(std::uint64_t size, std::uint64_t before) {
  return size - std::min(size, before) <= before / 4;
}

double best_of(std::vector<double> const& rates) {
  return *std::max_element(rates.begin(), rates.end());
}

void keep_last(std::vector<double>& rates, double rate) {
  if (rates.size() == rates_compared) {
    rates.erase(rates.begin());
  }
  rates.push_back(rate);
}

}  // namespace

recomputing_planner::recomputing_planner(batch_planner::settings const& how, bool offered)
    : settings_(how), offered_(offered), ways_{way{batch_planner{how}}, way{batch_planner{how}}} {}

/// Whether more memory would not make the next micro-batch larger.
bool recomputing_planner::is_enough(batch_planner::input const& now,
                                    batch_planner::slice const& plain) {
  if (plain.wait || settings_.fixed) {
    return !plain.wait;
  }
  auto const with_any =
      at(false).planner.plan({.remaining_samples = now.remaining_samples,
                              .arena_bytes = std::numeric_limits<std::uint64_t>::max()});
  return plain.samples >= with_any.samples;
}

/// Of so much memory; begins a trial if one is due.
void recomputing_planner::find_verdict(std::uint64_t arena_bytes) {
  auto const level = level_of(arena_bytes);
  auto const before = verdicts_.find(level_);
  bool const recomputed = before != verdicts_.end() && before->second.recompute;
  auto& found =
      verdicts_.try_emplace(level, verdict{.recompute = recomputed, .interval = first_interval})
          .first->second;
  if (level != level_) {
    level_ = level;
    tries_other_ = false;
    at(false).rates.clear();
    at(true).rates.clear();
  }
  if (!tries_other_ && found.until_trial == 0 &&
      at(found.recompute).rates.size() == rates_compared) {
    tries_other_ = true;
    tries_ = 0;
    most_tried_ = 0;
    at(!found.recompute).rates.clear();
  }
}

recomputing_planner::choice recomputing_planner::plan(batch_planner::input const& now) {
  auto const plain = at(false).planner.plan(now);
  short_ = offered_ && now.remaining_samples > 0 && !is_enough(now, plain);
  if (!short_) {
    return {plain, false};
  }
  auto again = at(true).planner.plan(now);
  if (plain.wait || again.wait) {
    bool const recompute = plain.wait && (!again.wait || again.needed_bytes < plain.needed_bytes);
    return recompute ? choice{again, true} : choice{plain, false};
  }
  find_verdict(now.arena_bytes);
  if (verdicts_.at(level_).recompute == tries_other_) {
    return {plain, false};
  }
  extend(again, plain.samples, now.remaining_samples);
  return {again, true};
}

/// One size does not tell what others need: as many as fit otherwise are tried, and then twice as many.
void recomputing_planner::extend(batch_planner::slice& again, std::uint64_t with_kept,
                                 std::uint64_t remaining) {
  auto const first = at(true).first_size;
  if (at(true).has_several) {
    return;
  }
  auto const most = std::min(remaining, settings_.largest);
  again.samples = std::min(most, first == 0 ? with_kept : 2 * first);
  again.slices_left = (remaining - 1) / again.samples + 1;
}

void recomputing_planner::committed(bool recomputed, std::uint64_t samples, std::uint64_t bytes,
                                    seconds took, std::uint64_t at_first_bytes) {
  auto& ran = at(recomputed);
  ran.planner.committed(samples, bytes, took, at_first_bytes);
  if (samples == 0) {
    return;
  }
  ran.has_several = ran.has_several || (ran.first_size != 0 && ran.first_size != samples);
  ran.first_size = ran.first_size == 0 ? samples : ran.first_size;
  at(!recomputed).planner.other_committed();
  auto const found = verdicts_.find(level_);
  if (!short_ || found == verdicts_.end() || !(took.count() > 0.0) ||
      !std::isfinite(took.count())) {
    return;
  }
  auto const rate = static_cast<double>(samples) / took.count();
  auto& current = found->second;
  if (recomputed == current.recompute) {
    keep_last(ran.rates, rate);
    current.until_trial -= std::min<std::uint64_t>(current.until_trial, 1);
  } else if (tries_other_) {
    note_trial(samples, rate);
  }
}

void recomputing_planner::note_trial(std::uint64_t samples, double rate) {
  bool const is_steady = tries_ > 0 && is_near(samples, most_tried_);
  most_tried_ = std::max(most_tried_, samples);
  bool const recomputes = verdicts_.at(level_).recompute;
  auto& other = at(!recomputes).rates;
  if (++tries_ >= most_tries || is_steady) {
    keep_last(other, rate);
  }
  if (other.size() == rates_compared) {
    end_trial(best_of(other) > (1.0 + least_gain_of_change) * best_of(at(recomputes).rates));
  }
}

void recomputing_planner::end_trial(bool other_is_better) {
  auto& current = verdicts_.at(level_);
  current.recompute = current.recompute != other_is_better;
  current.interval =
      other_is_better ? first_interval : std::min(2 * current.interval, longest_interval);
  current.until_trial = current.interval;
  tries_other_ = false;
}

/// Whichever way it ran: the next micro-batch of either is to have less to lose. What is compared is compared anew.
void recomputing_planner::discarded(std::uint64_t samples) {
  for (auto& each : ways_) {
    each.planner.discarded(samples);
    each.rates.clear();
  }
  tries_other_ = false;
}

void recomputing_planner::out_of_memory(bool recomputed, std::uint64_t samples,
                                        std::uint64_t arena_bytes) {
  auto& ran = at(recomputed);
  ran.planner.out_of_memory(samples, arena_bytes);
  ran.has_several = ran.has_several || samples > 0;  // the planner knows better now
  if (tries_other_ && recomputed != verdicts_.at(level_).recompute && ++tries_ >= most_tries) {
    end_trial(false);
  }
}

}  // namespace sluice::scheduler
