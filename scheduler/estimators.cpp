#include "scheduler/estimators.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {

namespace {

// Of what is longer nothing is learned, and sums and squares of it have no end.
constexpr double longest_s = 1e9;

double checked(char const* what, seconds value, bool positive) {
  double const x = value.count();
  if (!std::isfinite(x) || x < 0.0 || (positive && x == 0.0)) {
    throw std::invalid_argument(std::string(what) + " must be a finite number of seconds " +
                                (positive ? "> 0" : ">= 0") + "; got " + std::to_string(x));
  }
  return std::min(x, longest_s);
}

// More than is ever counted, and still far from where squares have no end.
constexpr double most_counted = 1e15;
// Gaps and durations are a matter of the model and its clients, which change over days.
constexpr seconds long_memory{86400.0};

double forgotten(seconds age, seconds time_constant) noexcept {
  return age.count() > 0.0 ? std::exp(-(age / time_constant)) : 1.0;
}

/// Of what was kept, which may have been written by anybody.
double known(char const* what, double value, double most = most_counted) {
  if (!(value >= 0.0) || !(value <= most)) {
    throw std::invalid_argument(std::string(what) + " must be a number from 0 to " +
                                std::to_string(most) + "; got " + std::to_string(value));
  }
  return value;
}

}  // namespace

decayed_rate::decayed_rate(seconds time_constant, instant start)
    : time_constant_(checked("the time constant", time_constant, true)),
      start_(start),
      last_(start) {}

void decayed_rate::count(instant at) noexcept {
  double const since = std::max(0.0, (at - last_).count());
  sum_ = sum_ * std::exp(-since / time_constant_) + 1.0;
  last_ = std::max(last_, at);
}

double decayed_rate::per_second(instant now) const noexcept {
  double const since = std::max(0.0, (now - last_).count());
  // A lone event right after the start must not read as thousands per second: at least a tenth of τ
  // is assumed.
  double const exposure = std::max(0.1, watched(now));
  return sum_ * std::exp(-since / time_constant_) / (time_constant_ * exposure);
}

double decayed_rate::watched(instant now) const noexcept {
  double const length = std::max(0.0, (now - start_).count());
  constexpr double long_watched = 40.0;  // beyond, e^{-x} is no more than rounding
  return length > long_watched * time_constant_
             ? 1.0
             : 1.0 - (1.0 - watched_before_) * std::exp(-length / time_constant_);
}

decayed_rate::kept_state decayed_rate::kept(instant now) const noexcept {
  double const since = std::max(0.0, (now - last_).count());
  return {.events = sum_ * std::exp(-since / time_constant_), .watched = watched(now)};
}

void decayed_rate::recall(kept_state const& from, seconds age, instant now) {
  double const part = forgotten(age, time_constant());
  double const events = known("the events of a rate", from.events) * part;
  watched_before_ = known("the watched share of a rate", from.watched, 1.0) * part;
  sum_ = events;
  start_ = last_ = now;
}

arrival_rates::arrival_rates(instant start, seconds fast, seconds slow)
    : fast_(fast, start), slow_(slow, start) {}

void arrival_rates::count(instant at) noexcept {
  fast_.count(at);
  slow_.count(at);
}

void arrival_rates::recall(kept_state const& from, seconds age, instant now) {
  fast_.recall(from.fast, age, now);
  slow_.recall(from.slow, age, now);
}

double arrival_rates::planned(instant now) const noexcept {
  double const slow_rate = slow(now);
  double const fast_rate = fast(now);
  // Of a Poisson stream of the slow rate the fast estimate varies by this.
  double const noise = std::sqrt(slow_rate / (2.0 * fast_memory().count()));
  constexpr double deviations = 3.0;
  return fast_rate > std::max(2.0 * slow_rate, slow_rate + deviations * noise) ? fast_rate
                                                                               : slow_rate;
}

namespace {

constexpr double smallest_gap = 1e-3;
constexpr double bins_per_octave = 4.0;
constexpr double gap_growth = 1.001;  // weight of a gap over that of the one before: halves in 700

std::size_t bin_of(double gap, std::size_t bins) noexcept {
  if (gap < smallest_gap) {
    return 0;
  }
  double const octaves = std::log2(gap / smallest_gap);
  return std::min(bins - 1, static_cast<std::size_t>(octaves * bins_per_octave) + 1);
}

double upper_edge(std::size_t bin) noexcept {
  return smallest_gap * std::exp2(static_cast<double>(bin) / bins_per_octave);
}

}  // namespace

void gap_histogram::add(seconds gap) {
  double const value = checked("a gap between arrivals", gap, false);
  unit_ *= gap_growth;
  auto& b = bins_[bin_of(value, bins)];
  b.count += unit_;
  b.total_s += unit_ * value;
  if (unit_ > 1e100) {
    for (auto& each : bins_) {
      each.count /= unit_;
      each.total_s /= unit_;
    }
    unit_ = 1.0;
  }
}

double gap_histogram::weight() const noexcept {
  double sum = 0.0;
  for (auto const& b : bins_) {
    sum += b.count;
  }
  return sum / unit_;
}

std::optional<double> gap_histogram::mean_rate_per_s() const noexcept {
  double count = 0.0;
  double total_s = 0.0;
  for (auto const& b : bins_) {
    count += b.count;
    total_s += b.total_s;
  }
  return count >= prior_gaps * unit_ && total_s > 0.0 ? std::optional{count / total_s}
                                                      : std::nullopt;
}

gap_histogram::kept_state gap_histogram::kept() const {
  kept_state result;
  for (std::size_t i = 0; i < bins; ++i) {
    if (bins_[i].count > 0.0) {
      result.push_back({i, bins_[i].count / unit_, bins_[i].total_s / unit_});
    }
  }
  return result;
}

void gap_histogram::recall(kept_state const& from, seconds age) {
  std::array<bin, bins> recalled{};
  double const part = forgotten(age, long_memory);
  for (auto const& each : from) {
    if (each.bin >= bins) {
      throw std::invalid_argument("a gap's bin must be below " + std::to_string(bins) + "; got " +
                                  std::to_string(each.bin));
    }
    double const weight = known("a bin's weight", each.weight);
    recalled.at(each.bin) = {weight * part,
                             known("a bin's gaps", each.total_s, 2.0 * longest_s * weight) * part};
  }
  bins_ = recalled;
  unit_ = 1.0;
}

gap_histogram::sums gap_histogram::summed() const noexcept {
  sums result;
  for (std::size_t i = bins; i-- > 0;) {
    result.at_[i] = {bins_[i].count / unit_, bins_[i].total_s / unit_};
    result.from_[i] = {result.from_[i + 1].count + result.at_[i].count,
                       result.from_[i + 1].total_s + result.at_[i].total_s};
  }
  return result;
}

gap_histogram::release_odds gap_histogram::sums::beyond(seconds timeout,
                                                        double rate_per_s) const noexcept {
  if (timeout == forever) {
    return {};
  }
  double const t = std::max(0.0, timeout.count());
  std::size_t const here = bin_of(t, bins);
  double exceeding = from_[here + 1].count;
  double remainder_s = from_[here + 1].total_s - t * from_[here + 1].count;  // Σ (gap − t)+
  if (here + 1 < bins) {
    // Inside a bin gaps are taken as evenly spread.
    double const low = here == 0 ? 0.0 : upper_edge(here - 1);
    double const high = upper_edge(here);
    double const above = at_[here].count * (high - t) / (high - low);
    exceeding += above;
    remainder_s += above * 0.5 * (high - t);
  }
  double const prior = prior_gaps * std::exp(-rate_per_s * t);
  // Times are counted in mean gaps, 1/rate, so that a stream that has all but ceased needs no
  // infinite prior.
  double const share =
      (remainder_s * rate_per_s + prior) / (from_[0].total_s * rate_per_s + prior_gaps);
  double const exceed = (exceeding + prior) / (from_[0].count + prior_gaps);
  return {.exceed = std::min(1.0, exceed), .time_share = std::clamp(share, 0.0, 1.0)};
}

dispersion_index::dispersion_index(seconds window, instant start)
    : window_(checked("the window", window, true)), begin_(start) {}

namespace {

constexpr double keep = 1.0 - 1.0 / 200.0;  // a window's weight after each newer one

}  // namespace

void dispersion_index::close_windows(instant now) noexcept {
  double const passed = std::floor((now - begin_).count() / window_);
  if (!(passed >= 1.0) || !std::isfinite(passed)) {
    return;  // nor where the clock says nothing
  }
  closed_ = std::min(closed_ + passed, most_counted);  // by a clock that has leapt
  windows_ = windows_ * keep + 1.0;
  sum_ = sum_ * keep + open_count_;
  square_sum_ = square_sum_ * keep + open_count_ * open_count_;
  open_count_ = 0.0;
  // All further windows were empty; a day of them costs no more than one.
  double const decay = std::pow(keep, passed - 1.0);
  windows_ = windows_ * decay + (1.0 - decay) / (1.0 - keep);
  sum_ *= decay;
  square_sum_ *= decay;
  begin_ += seconds{passed * window_};
}

void dispersion_index::count(instant at) noexcept {
  close_windows(at);
  open_count_ += 1.0;
}

std::optional<double> dispersion_index::value(instant now) noexcept {
  close_windows(now);
  if (closed_ < needed_windows || sum_ <= 1e-9) {
    return std::nullopt;
  }
  double const mean = sum_ / windows_;
  return std::max(0.0, square_sum_ / windows_ - mean * mean) / mean;
}

dispersion_index::kept_state dispersion_index::kept(instant now) noexcept {
  close_windows(now);
  return {closed_, windows_, sum_, square_sum_};
}

void dispersion_index::recall(kept_state const& from, seconds age, instant now) {
  double const part = age.count() > 0.0 ? std::pow(keep, age.count() / window_) : 1.0;
  double const closed = known("the number of windows", from.closed);
  double const weight = known("the weight of windows", from.weight);
  double const sum = known("the arrivals of windows", from.sum, weight * 1e9);
  square_sum_ = part * known("the squares of windows", from.square_sum, weight * 1e18);
  closed_ = std::floor(closed * part);
  windows_ = weight * part;
  sum_ = sum * part;
  begin_ = now;
  open_count_ = 0.0;
}

duration_window::duration_window(duration_prior prior) : prior_(prior) {
  checked("a prior's mean duration", prior.mean, false);
  if (!(prior.scv >= 0.0) || !std::isfinite(prior.scv)) {
    throw std::invalid_argument("a prior's scv must be a finite number >= 0; got " +
                                std::to_string(prior.scv));
  }
  samples_.reserve(capacity);
}

void duration_window::add(seconds duration) {
  double const value = checked("a duration", duration, false);
  if (samples_.size() < capacity) {
    samples_.push_back(value);
  } else {
    sum_ -= samples_[next_];
    square_sum_ -= samples_[next_] * samples_[next_];
    samples_[next_] = value;
    next_ = (next_ + 1) % capacity;
  }
  sum_ += value;
  square_sum_ += value * value;
  ++count_;
  if (count_ % capacity == 0) {  // before what sums lose by rounding tells
    sum_anew();
  }
}

void duration_window::sum_anew() noexcept {
  sum_ = square_sum_ = 0.0;
  for (double const x : samples_) {
    sum_ += x;
    square_sum_ += x * x;
  }
}

duration_window::kept_state duration_window::kept() const {
  auto result = samples_;
  std::rotate(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(next_), result.end());
  return result;
}

void duration_window::recall(kept_state const& from, seconds age) {
  if (from.size() > capacity) {
    throw std::invalid_argument("there are at most " + std::to_string(capacity) +
                                " durations; got " + std::to_string(from.size()));
  }
  for (double const each : from) {
    known("a duration", each, longest_s);
  }
  double const left = std::round(static_cast<double>(from.size()) * forgotten(age, long_memory));
  samples_.assign(from.end() - static_cast<std::ptrdiff_t>(left), from.end());
  next_ = 0;
  sum_anew();
}

seconds duration_window::mean() const noexcept {
  return seconds{samples_.empty() ? 0.0
                                  : std::max(0.0, sum_) / static_cast<double>(samples_.size())};
}

seconds duration_window::mean_deviation() const noexcept {
  if (samples_.empty()) {
    return seconds{0.0};
  }
  auto const n = static_cast<double>(samples_.size());
  double const mean_s = mean().count();
  return seconds{std::sqrt(std::max(0.0, square_sum_ / n - mean_s * mean_s) / n)};
}

distribution duration_window::estimate() const {
  constexpr double prior_samples = 3.0;
  if (measured()) {
    return distribution::of_samples(samples_);
  }
  double sum = prior_samples * prior_.mean.count();
  for (double const x : samples_) {
    sum += x;
  }
  return distribution::gamma(seconds{sum / (prior_samples + static_cast<double>(samples_.size()))},
                             prior_.scv);
}

std::optional<double> attainment_window::observation::share() const noexcept {
  return requests == 0
             ? std::nullopt
             : std::optional<double>(static_cast<double>(within) / static_cast<double>(requests));
}

attainment_window::attainment_window(seconds length, instant start)
    : slice_s_(checked("the window", length, true) / static_cast<double>(slices)), start_(start) {}

void attainment_window::advance(instant now) noexcept {
  constexpr double last_slice = 9e15;  // a clock that is broken ends here
  auto const slice = static_cast<std::int64_t>(
      std::min(last_slice, std::max(0.0, (now - start_).count()) / slice_s_));
  for (std::int64_t i = std::max(newest_ + 1, slice - slices + 1); i <= slice; ++i) {
    ring_[static_cast<std::size_t>(i % slices)] = {};
  }
  newest_ = std::max(newest_, slice);
}

void attainment_window::add(instant at, bool within) noexcept {
  advance(at);
  auto& slice = ring_[static_cast<std::size_t>(newest_ % slices)];
  ++slice.requests;
  slice.within += within ? 1U : 0U;
}

attainment_window::kept_state attainment_window::kept(instant now) {
  advance(now);
  double const length = std::max(0.0, (now - start_).count());
  kept_state result{
      .slice_s = slice_s_,
      .into_s = std::clamp(length - static_cast<double>(newest_) * slice_s_, 0.0, slice_s_),
      .seen = {}};
  for (std::int64_t i = 0; i < slices; ++i) {
    result.seen.push_back(ring_[static_cast<std::size_t>((newest_ + slices - i) % slices)]);
  }
  return result;
}

void attainment_window::recall(kept_state const& from, seconds age, instant now) {
  if (from.seen.size() > static_cast<std::size_t>(slices)) {
    throw std::invalid_argument("a window has " + std::to_string(slices) + " slices; got " +
                                std::to_string(from.seen.size()));
  }
  for (auto const& each : from.seen) {
    known("the requests of a slice", static_cast<double>(each.requests));
    known("those in time", static_cast<double>(each.within), static_cast<double>(each.requests));
  }
  double const slice_s = known("the length of a slice", from.slice_s);
  double const into_s = known("the time of a slice", from.into_s, slice_s);
  ring_ = {};
  newest_ = 0;
  start_ = now;
  if (std::abs(slice_s - slice_s_) > 1e-6 * slice_s_) {
    return;
  }
  newest_ = slices - 1;
  start_ = now - seconds{into_s + static_cast<double>(newest_) * slice_s_};
  start_ -= std::max(seconds{0.0}, std::min(age, seconds{longest_s}));
  for (std::size_t i = 0; i < from.seen.size(); ++i) {
    ring_[static_cast<std::size_t>(newest_) - i] = from.seen[i];
  }
}

attainment_window::observation attainment_window::read(instant now) noexcept {
  advance(now);
  observation all;
  for (auto const& slice : ring_) {
    all.requests += slice.requests;
    all.within += slice.within;
  }
  return all;
}

void copy_time::add(double copied_share, seconds load) noexcept {
  if (!std::isfinite(copied_share) || !std::isfinite(load.count())) {
    return;
  }
  double const share = std::clamp(copied_share, 0.0, 1.0);
  double const time = std::clamp(load.count(), 0.0, 1e9);
  loads_ += 1.0;
  shares_ += share;
  times_ += time;
  squares_ += share * share;
  products_ += share * time;
}

std::optional<seconds> copy_time::of_all() const noexcept {
  constexpr double least_variance = 1e-4;  // of shares a hundredth apart
  if (squares_ <= 0.0) {
    return std::nullopt;
  }
  double const from_origin = products_ / squares_;
  double const spread = squares_ - shares_ * shares_ / loads_;
  if (spread < least_variance * loads_) {
    return seconds{from_origin};
  }
  return seconds{std::clamp((products_ - shares_ * times_ / loads_) / spread, 0.0, from_origin)};
}

}  // namespace sluice::scheduler
