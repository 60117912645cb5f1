#include "scheduler/batch_planner.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace sluice::scheduler {

namespace {

constexpr std::size_t most_sizes = 16;
constexpr std::size_t values_per_size = 5;
constexpr double memory_margin = 1.05;  // the caching allocator rounds and fragments
constexpr double least_gain = 0.02;
// So many times as large, for noise not to be what differs.
constexpr std::uint64_t sizes_apart = 2;
// How many micro-batches ago a size may have run for its time to be believed.
constexpr std::uint64_t times_believed = 4;

double median(std::vector<double> values) {
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) {
    return *middle;
  }
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

using xy = std::pair<double, double>;

double median_slope(std::vector<xy> const& points) {
  std::vector<double> slopes;
  for (std::size_t i = 0; i < points.size(); ++i) {
    for (std::size_t j = i + 1; j < points.size(); ++j) {
      slopes.push_back((points[j].second - points[i].second) / (points[j].first - points[i].first));
    }
  }
  return slopes.empty() ? points.front().second / points.front().first
                        : std::max(0.0, median(std::move(slopes)));
}

double as_double(std::uint64_t n) {
  return static_cast<double>(n);
}

std::uint64_t as_count(double x) {
  constexpr double most = 9e18;
  return x <= 0.0 ? 0 : static_cast<std::uint64_t>(std::min(x, most));
}

}  // namespace

void cost_model::add(std::uint64_t samples, double value) {
  auto found = std::find_if(points_.begin(), points_.end(),
                            [&](point const& p) { return p.samples == samples; });
  if (found == points_.end()) {
    if (points_.size() == most_sizes) {
      points_.erase(std::min_element(
          points_.begin(), points_.end(),
          [](point const& a, point const& b) { return a.last_used < b.last_used; }));
    }
    points_.push_back({.samples = samples});
    found = std::prev(points_.end());
  }
  if (found->values.size() == values_per_size) {
    found->values.erase(found->values.begin());
  }
  found->values.push_back(value);
  found->last_used = ++uses_;
}

void cost_model::forget_older(std::uint64_t uses) {
  std::erase_if(points_, [&](point const& p) { return uses_ - p.last_used >= uses; });
}

linear_cost cost_model::typical() const {
  if (points_.empty()) {
    return {};
  }
  std::vector<xy> medians;
  medians.reserve(points_.size());
  for (auto const& p : points_) {
    medians.emplace_back(as_double(p.samples), median(p.values));
  }
  double const slope = median_slope(medians);
  std::vector<double> bases;
  bases.reserve(medians.size());
  for (auto const& [samples, value] : medians) {
    bases.push_back(value - slope * samples);
  }
  return {.base = std::max(0.0, median(std::move(bases))), .slope = slope};
}

linear_cost cost_model::envelope() const {
  if (points_.empty()) {
    return {};
  }
  std::vector<xy> tops;
  tops.reserve(points_.size());
  for (auto const& p : points_) {
    tops.emplace_back(as_double(p.samples), *std::max_element(p.values.begin(), p.values.end()));
  }
  double const slope = median_slope(tops);
  double base = 0.0;
  for (auto const& [samples, value] : tops) {
    base = std::max(base, value - slope * samples);
  }
  return {.base = base, .slope = slope};
}

batch_planner::batch_planner(settings const& how) : settings_(how), limit_(how.largest) {
  if (how.largest == 0) {
    throw std::invalid_argument("the largest micro-batch must be at least 1 sample; got 0");
  }
}

// Time a + b·n per micro-batch: doubling n raises throughput by a/(a + 2bn), which falls to 2 % at
// n = 24.5 a/b.
std::uint64_t batch_planner::where_growth_ends() const {
  auto const& points = time_.points();
  if (limit_ == settings_.largest || points.empty()) {
    return settings_.largest;  // nothing was taken away of late
  }
  auto const [least, most] = std::ranges::minmax_element(points, {}, &cost_model::point::samples);
  if (most->samples < sizes_apart * least->samples) {
    return settings_.largest;  // the sizes do not tell base from slope
  }
  auto const cost = time_.typical();
  if (cost.slope <= 0.0) {
    return settings_.largest;
  }
  double const ends = std::ceil(cost.base / cost.slope * (1.0 / least_gain - 1.0) / 2.0);
  // Noise can hide the base. Below the smallest size that was measured the fit is not believed.
  return std::clamp<std::uint64_t>(as_count(ends), std::min(least->samples, settings_.largest),
                                   settings_.largest);
}

// The least in which this size, or a larger one, has always run of late; the largest number if neither has.
std::uint64_t batch_planner::has_run_in(std::uint64_t samples) const {
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (auto const& p : ran_in_.points()) {
    if (p.samples >= samples) {
      least = std::min(least, as_count(*std::max_element(p.values.begin(), p.values.end())));
    }
  }
  return least;
}

// The largest size that has always run in so much of late; 0 if none has.
std::uint64_t batch_planner::largest_that_ran_in(std::uint64_t arena_bytes) const {
  std::uint64_t found = 0;
  for (auto const& p : ran_in_.points()) {
    if (as_count(*std::max_element(p.values.begin(), p.values.end())) <= arena_bytes) {
      found = std::max(found, p.samples);
    }
  }
  return found;
}

// What is worth a new attempt at the size that ran out of memory: what it has run in before, if there was less this time,
// and never more than a margin above that. Else who holds all the rest would end training.
std::uint64_t batch_planner::worth_trying_again() const {
  std::uint64_t const with_margin =
      as_count(std::ceil(memory_margin * as_double(shortage_.arena_bytes))) + 1;
  std::uint64_t const before = has_run_in(shortage_.samples);
  return before > shortage_.arena_bytes ? std::min(with_margin, before) : with_margin;
}

// What a micro-batch of this size is sure to need: it is not less than what the same size or a
// smaller one needed.
std::uint64_t batch_planner::least_known_need(std::uint64_t samples) const {
  std::uint64_t known = 1;
  for (auto const& p : ran_in_.points()) {
    if (p.samples <= samples) {
      known = std::max(known, as_count(*std::min_element(p.values.begin(), p.values.end())));
    }
  }
  if (shortage_.samples > 0 && shortage_.samples <= samples) {
    known = std::max(known, worth_trying_again());
  }
  return known;
}

batch_planner::slice batch_planner::plan(input const& now) const {
  if (now.remaining_samples == 0) {
    return {};
  }
  auto const cost = memory_.envelope();
  auto const need = [&](std::uint64_t samples) {
    return as_count(std::ceil(memory_margin * cost.at(samples)));
  };

  std::uint64_t const smallest =
      std::min(settings_.fixed ? settings_.largest : 1, now.remaining_samples);
  std::uint64_t const known = least_known_need(smallest);
  if (known > now.arena_bytes) {
    return {.wait = true, .needed_bytes = known};
  }
  std::uint64_t most = settings_.largest;
  if (!settings_.fixed) {
    most = std::min(limit_, where_growth_ends());
    if (cost.slope > 0.0) {
      double const room = as_double(now.arena_bytes) / memory_margin - cost.base;
      most = std::min(most,
                      std::max(as_count(room / cost.slope), largest_that_ran_in(now.arena_bytes)));
    }
    if (shortage_.samples > 0 && now.arena_bytes < worth_trying_again()) {
      most = std::min(most, shortage_.samples - 1);
    }
    most = std::max<std::uint64_t>(1, most);
  }
  std::uint64_t const slices = (now.remaining_samples - 1) / most + 1;
  std::uint64_t const samples = settings_.fixed ? std::min(most, now.remaining_samples)
                                                : (now.remaining_samples - 1) / slices + 1;
  return {.samples = samples, .slices_left = slices, .needed_bytes = need(samples)};
}

void batch_planner::committed(std::uint64_t samples, std::uint64_t bytes, seconds took,
                              std::uint64_t at_first_bytes) {
  if (samples == 0) {
    return;
  }
  memory_.add(samples, as_double(std::max(bytes, at_first_bytes)));
  ran_in_.add(samples, as_double(bytes));
  if (took.count() > 0.0 && std::isfinite(took.count())) {
    time_.add(samples, took.count());
    time_.forget_older(times_believed);
  }
  if (shortage_.samples > 0 && (samples >= shortage_.samples || --shortage_.commits_left == 0)) {
    shortage_ = {};
  }
  grow_back();
}

// Even cutting may plan less than the limit; then the limit itself has not been tried, and still it grows.
void batch_planner::grow_back() noexcept {
  std::uint64_t const step = std::max<std::uint64_t>(1, limit_ / 4);
  limit_ = limit_ >= settings_.largest - std::min(step, settings_.largest) ? settings_.largest
                                                                           : limit_ + step;
}

void batch_planner::shrink_below(std::uint64_t samples) noexcept {
  limit_ = std::max<std::uint64_t>(1, std::min(limit_, samples / 2));
}

void batch_planner::discarded(std::uint64_t samples) {
  shrink_below(samples);
}

void batch_planner::out_of_memory(std::uint64_t samples, std::uint64_t arena_bytes) {
  if (samples == 0) {
    return;
  }
  constexpr unsigned remembered_commits = 64;
  shortage_ = {.samples = samples, .arena_bytes = arena_bytes, .commits_left = remembered_commits};
  shrink_below(samples);
}

}  // namespace sluice::scheduler
