#include "scheduler/periods.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace sluice::scheduler {
namespace {

constexpr double shortest_silence_s = 1.0;
constexpr double silence_ratio = 5.0;
// Fewer bunches say nothing, however regular; after a change of the period so many suffice.
constexpr std::size_t fewest = 8;
constexpr std::size_t tried_every = 4;
// Off by more than this share of a period, a bunch is on no grid.
constexpr double reach = 0.2;
// To leave one out of a window must say so much more, of that logarithm.
constexpr double worth_leaving_out = 2.0;
// No clock of a client is better than this.
constexpr double least_jitter = 0.005;
// log₁₀ of how seldom bunches without a period may seem to have one.
constexpr double needed_chance = -8.0;
// One that was found is not given up for a few that were off.
constexpr double kept_chance = -5.0;
// A window is wider than what was seen, which is the most of a few; and a line's end is as uncertain as two deviations of all its
// points, over the root of their number, twice that to be on the safe side. Of jitter a deviation is about half of the most.
constexpr double spare_jitter = 1.25;
constexpr double uncertain_end = 2.0;
// What bunches were like is remembered over so many.
constexpr double remembered_outcomes = 256.0;
constexpr double remembered_bunches = 16.0;
// Jeffreys' prior of a share.
constexpr double prior = 0.5;
constexpr std::size_t generation = 32;
// What is kept for another one is no longer ago.
constexpr double longest_ago_s = 1e12;

/// How well bunches lie on a grid.
struct spread {
  double width_s = 0.0;
  std::size_t on_time = 0;
  double chance = 0.0;  ///< log₁₀ of that, if there were no period
};

/// The width that says most. Of `all` bunches those within it are on time; two of them made the grid, and say nothing. `off` are of those
/// that may be, sorted here.
spread best_spread(std::span<double> off, std::size_t all, double period_s) noexcept {
  std::sort(off.begin(), off.end());
  spread best;
  double least = 0.0;
  double ways = 0.0;  // log₁₀ of the binomial coefficient: of all, so many
  for (std::size_t i = 0; i < all - off.size(); ++i) {
    ways += std::log10(static_cast<double>(all - i) / static_cast<double>(i + 1));
  }
  for (std::size_t on_time = off.size(); 3 * on_time >= 2 * all && on_time > 2; --on_time) {
    double const width = std::max(least_jitter * period_s, off[on_time - 1]);
    double const share = std::min(1.0, 2.0 * width / period_s);
    double const chance = ways + static_cast<double>(on_time - 2) * std::log10(share);
    double const weighed = chance + worth_leaving_out * static_cast<double>(off.size() - on_time);
    if (weighed < least) {
      least = weighed;
      best = {width, on_time, chance};
    }
    ways += std::log10(static_cast<double>(on_time) / static_cast<double>(all - on_time + 1));
  }
  return best;
}

/// Of a few bunches those that are whole periods apart.
class grid {
 public:
  grid(std::span<double const> begins, std::size_t anchor, double period_s)
      : begins_(begins), period_s_(period_s) {
    is_on_[anchor] = true;
    std::size_t last = anchor;
    for (std::size_t i = anchor + 1; i < begins.size(); ++i) {
      last = try_to_place(i, last) ? i : last;
    }
    last = anchor;
    for (std::size_t i = anchor; i-- > 0;) {
      last = try_to_place(i, last) ? i : last;
    }
  }

  [[nodiscard]] bool is_on(std::size_t bunch) const noexcept { return is_on_[bunch]; }
  [[nodiscard]] double number(std::size_t bunch) const noexcept { return numbers_[bunch]; }

 private:
  bool try_to_place(std::size_t bunch, std::size_t beside) noexcept {
    double const apart = (begins_[bunch] - begins_[beside]) / period_s_;
    double const whole = std::round(apart);
    is_on_[bunch] = whole != 0.0 && std::abs(apart - whole) <= reach;
    numbers_[bunch] = numbers_[beside] + whole;
    return is_on_[bunch];
  }

  std::span<double const> begins_;
  double period_s_;
  std::array<bool, period_estimator::remembered> is_on_{};
  std::array<double, period_estimator::remembered> numbers_{};
};

}  // namespace

void period_estimator::bunches::begin(double at_s, double last_s) noexcept {
  if (number > 0) {
    double const weight = 1.0 / std::min(static_cast<double>(number), remembered_bunches);
    requests += weight * (in_last - requests);
    span_s += weight * (last_s - begins[(number - 1) % remembered] - span_s);
    if (number % generation == 0) {
      longest_before_s = longest_quiet_s;
      longest_quiet_s = 0.0;
    }
  }
  begins[number % remembered] = at_s;
  ++number;
  in_last = 1.0;
}

void period_estimator::bunches::go_on(double gap_s) noexcept {
  in_last += 1.0;
  longest_quiet_s = std::max(longest_quiet_s, gap_s);
}

void period_estimator::count(instant at) noexcept {
  if (!has_begun_) {
    has_begun_ = true;
    first_ = at;
    for (auto& each : by_silence_) {
      each.begin(0.0, 0.0);
    }
    return;
  }
  double const at_s = std::max(last_s_, seconds_at(at));
  double const gap_s = at_s - last_s_;
  double silence_s = shortest_silence_s;
  for (std::size_t i = 0; i < silences; ++i, silence_s *= silence_ratio) {
    if (gap_s > silence_s) {
      by_silence_[i].begin(at_s, last_s_);
      look_at(i, at_s);
    } else {
      by_silence_[i].go_on(gap_s);
    }
  }
  last_s_ = at_s;
}

void period_estimator::look_at(std::size_t silence, double at_s) noexcept {
  if (found_ && (found_->silence == silence || left_out_at(at_s) >= patience)) {
    follow(at_s);
    return;
  }
  auto const& those = by_silence_[silence];
  if (those.number < fewest || those.number % tried_every != 0) {
    return;
  }
  if (auto const seen = fit_of(those, needed_chance)) {
    take(silence, *seen);
  }
}

/// A bunch has begun while there is a period.
void period_estimator::follow(double at_s) noexcept {
  auto& its = *found_;
  double const late_s = at_s - its.is.next_s;
  double const skipped = std::max(0.0, std::round(late_s / its.is.period_s));
  bool const is_expected = std::abs(late_s - skipped * its.is.period_s) <= its.is.margin_s;
  bool const is_over = left_out_at(at_s) >= patience;
  auto const seen = is_over ? std::nullopt : fit_of(by_silence_[its.silence], kept_chance);
  if (!seen) {
    found_.reset();
    ++changes_;
    for (std::size_t i = 0; i < silences; ++i) {  // another one may tell its bunches apart better
      if (auto const other = fit_of(by_silence_[i], needed_chance)) {
        take(i, *other);
      }
    }
    return;
  }
  constexpr double kept = 1.0 - 1.0 / remembered_outcomes;
  its.bunches = kept * its.bunches + 1.0;
  its.unexpected = kept * its.unexpected + (is_expected ? 0.0 : 1.0);
  if (is_expected) {
    its.periods = kept * its.periods + 1.0 + skipped;
    its.left_out = kept * its.left_out + skipped;
  }
  its.is = *seen;
}

/// Where several silences tell bunches apart, the one that splits fewest, and else the one after which a model is gone sooner.
void period_estimator::take(std::size_t silence, fit const& seen) noexcept {
  finding const made{
      .silence = silence,
      .is = seen,
      .bunches = static_cast<double>(seen.all),
      .unexpected = static_cast<double>(seen.all - seen.on_time),
      .periods = seen.periods + 1.0,
      .left_out = std::max(0.0, seen.periods + 1.0 - static_cast<double>(seen.on_time))};
  auto const is_better = [&](finding const& before) {
    auto const is = described(made), was = described(before);
    constexpr double alike = 0.02;
    double const splits_less = before.unexpected / before.bunches - made.unexpected / made.bunches;
    constexpr double much_less = 0.8;
    return std::abs(splits_less) > alike
               ? splits_less > 0.0
               : (is.margin + is.quiet + is.span) / is.period <
                     much_less * ((was.margin + was.quiet + was.span) / was.period);
  };
  if (!found_ || is_better(*found_)) {
    found_ = made;
    ++changes_;
  }
}

std::optional<period_estimator::fit> period_estimator::fit_of(bunches const& those,
                                                              double most_chance) noexcept {
  std::array<double, remembered> begins{};
  auto const count = static_cast<std::size_t>(std::min<std::uint64_t>(those.number, remembered));
  for (std::size_t i = 0; i < count; ++i) {
    begins[i] = those.begins[(those.number - count + i) % remembered];
  }
  std::span<double const> const all{begins.data(), count};
  auto const by_all = fit_of(all, most_chance);
  return by_all || count <= fewest ? by_all : fit_of(all.last(fewest), most_chance);
}

std::optional<period_estimator::fit> period_estimator::fit_of(std::span<double const> begins,
                                                              double most_chance) noexcept {
  auto const all = begins.size();
  if (all < fewest) {
    return std::nullopt;
  }
  auto const gap = [&](std::size_t i) { return begins[i + 1] - begins[i]; };
  std::array<std::size_t, remembered> order{};
  std::iota(order.begin(), order.end(), std::size_t{0});
  auto const middle = order.begin() + static_cast<std::ptrdiff_t>((all - 1) / 2);
  std::nth_element(order.begin(), middle, order.begin() + static_cast<std::ptrdiff_t>(all - 1),
                   [&](auto a, auto b) { return gap(a) < gap(b); });
  double const typical = gap(*middle);
  if (!(typical > 0.0)) {
    return std::nullopt;
  }
  // The median gap has a bunch on time at either end, whatever else there is.
  grid const on{begins, *middle, typical};

  double count = 0.0, numbers = 0.0, times = 0.0;
  std::size_t first = all, last = 0;
  for (std::size_t i = 0; i < all; ++i) {
    if (on.is_on(i)) {
      count += 1.0;
      numbers += on.number(i);
      times += begins[i];
      first = std::min(first, i);
      last = i;
    }
  }
  if (3.0 * count < 2.0 * static_cast<double>(all)) {
    return std::nullopt;
  }
  double square = 0.0, product = 0.0;
  double const mean_number = numbers / count, mean_time = times / count;
  for (std::size_t i = 0; i < all; ++i) {
    if (on.is_on(i)) {
      double const from_mean = on.number(i) - mean_number;
      square += from_mean * from_mean;
      product += from_mean * (begins[i] - mean_time);
    }
  }
  double const slope = product / square;
  auto const on_line = [&](double number) { return mean_time + slope * (number - mean_number); };

  // A timer keeps to the line; one that sleeps between two keeps its distance to the last one.
  std::array<double, remembered> off_line{}, off_last{};
  std::size_t lines = 0, distances = 0;
  for (std::size_t i = first, before = first; i < all; ++i) {
    if (!on.is_on(i)) {
      continue;
    }
    off_line[lines++] = std::abs(begins[i] - on_line(on.number(i)));
    if (i != first) {
      double const expected = slope * (on.number(i) - on.number(before));
      off_last[distances++] = std::abs(begins[i] - begins[before] - expected);
      before = i;
    }
  }
  auto const by_line = best_spread({off_line.data(), lines}, all, slope);
  auto const by_last = best_spread({off_last.data(), distances}, all - 1, slope);
  bool const keeps_distance = by_last.chance < by_line.chance;
  auto const& best = keeps_distance ? by_last : by_line;
  double const periods = on.number(last) - on.number(first);
  if (best.chance > most_chance || 3.0 * static_cast<double>(best.on_time) < 2.0 * periods) {
    return std::nullopt;
  }
  // On a line one that belongs to no period may have taken the place of another.
  auto const nearest = [&](double begin) {
    return on_line(std::round(mean_number + (begin - mean_time) / slope));
  };
  auto const is_on_time = [&](std::size_t i) {
    return keeps_distance ? on.is_on(i)
                          : std::abs(begins[i] - nearest(begins[i])) <= spare_jitter * best.width_s;
  };
  double const wide = spare_jitter + uncertain_end / std::sqrt(static_cast<double>(lines));
  std::size_t recent = 0;
  double from = begins[last];
  for (std::size_t i = 0; i < all; ++i) {
    if (is_on_time(i)) {
      recent += i + tried_every >= all ? 1 : 0;
      from = keeps_distance ? begins[i] : nearest(begins[i]);
    }
  }
  if (recent + 1 < tried_every) {
    return std::nullopt;
  }
  return fit{.period_s = slope,
             .margin_s = best.width_s * (keeps_distance ? spare_jitter : wide),
             .next_s = from + slope,
             .on_time = std::min(all, best.on_time + (keeps_distance ? 1 : 0)),
             .all = all,
             .periods = periods};
}

periodic_arrivals period_estimator::described(finding const& of) const noexcept {
  auto const& those = by_silence_[of.silence];
  return {.period = seconds{of.is.period_s},
          .margin = seconds{of.is.margin_s},
          .quiet = seconds{std::max(those.longest_quiet_s, those.longest_before_s)},
          .span = seconds{those.span_s},
          .requests = std::max(1.0, those.requests),
          .unexpected = (of.unexpected + prior) / (of.bunches + 2.0 * prior),
          .left_out = of.left_out / std::max(1.0, of.periods)};
}

/// Whose windows are over.
std::int64_t period_estimator::left_out_at(double now_s) const noexcept {
  auto const& is = found_->is;
  double const over = (now_s - is.next_s - is.margin_s) / is.period_s;
  constexpr double most = 1e6;
  return over < 0.0 ? 0 : static_cast<std::int64_t>(std::min(over, most)) + 1;
}

std::optional<periodic_arrivals> period_estimator::found(instant now) const noexcept {
  if (!found_ || left_out_at(seconds_at(now)) >= patience) {
    return std::nullopt;
  }
  return described(*found_);
}

std::optional<period_estimator::window> period_estimator::next(instant now) const noexcept {
  if (!found_) {
    return std::nullopt;
  }
  auto const skipped = left_out_at(seconds_at(now));
  if (skipped >= patience) {
    return std::nullopt;
  }
  auto const& is = found_->is;
  double const middle = is.next_s + static_cast<double>(skipped) * is.period_s;
  return window{first_ + seconds{middle - is.margin_s}, first_ + seconds{middle + is.margin_s}};
}

std::optional<instant> period_estimator::lapses() const noexcept {
  if (!found_) {
    return std::nullopt;
  }
  auto const& is = found_->is;
  return first_ +
         seconds{is.next_s + static_cast<double>(patience - 1) * is.period_s + is.margin_s};
}

period_estimator::kept_state period_estimator::kept(instant now) const {
  kept_state result;
  result.now_s = std::max(last_s_, seconds_at(now));
  if (!has_begun_ ||
      !(result.now_s <= longest_ago_s)) {  // of a clock that has leapt there is no phase
    return {};
  }
  result.last_s = last_s_;
  for (auto const& each : by_silence_) {
    kept_bunches its{.number = each.number,
                     .in_last = each.in_last,
                     .requests = each.requests,
                     .span_s = each.span_s,
                     .longest_quiet_s = each.longest_quiet_s,
                     .longest_before_s = each.longest_before_s};
    auto const count = std::min<std::uint64_t>(each.number, remembered);
    for (std::uint64_t i = each.number - count; i < each.number; ++i) {
      its.begins.push_back(each.begins[i % remembered]);
    }
    result.by_silence.push_back(std::move(its));
  }
  if (found_ && left_out_at(result.now_s) < patience) {
    result.found = kept_finding{.silence = found_->silence,
                                .period_s = found_->is.period_s,
                                .margin_s = found_->is.margin_s,
                                .next_s = found_->is.next_s,
                                .bunches = found_->bunches,
                                .unexpected = found_->unexpected,
                                .periods = found_->periods,
                                .left_out = found_->left_out};
  }
  return result;
}

void period_estimator::recall(kept_state const& from, seconds age, instant now) {
  if (from.by_silence.empty()) {
    *this = period_estimator{};
    return;
  }
  check(from, age);
  period_estimator made;
  made.has_begun_ = true;
  made.last_s_ = from.last_s;
  for (std::size_t i = 0; i < silences; ++i) {
    auto const& its = from.by_silence[i];
    auto& to = made.by_silence_[i];
    to.number = its.number;
    to.in_last = its.in_last;
    to.requests = its.requests;
    to.span_s = its.span_s;
    to.longest_quiet_s = its.longest_quiet_s;
    to.longest_before_s = its.longest_before_s;
    for (std::size_t at = 0; at < its.begins.size(); ++at) {
      to.begins[(its.number - its.begins.size() + at) % remembered] = its.begins[at];
    }
  }
  double unwatched_s = age.count();
  if (from.found) {
    auto const& its = *from.found;
    made.found_ =
        finding{.silence = its.silence,
                .is = {.period_s = its.period_s, .margin_s = its.margin_s, .next_s = its.next_s},
                .bunches = its.bunches,
                .unexpected = its.unexpected,
                .periods = its.periods,
                .left_out = its.left_out};
    made.changes_ = 1;
    // Whole periods that nobody has seen are taken out, so that they are none without a bunch.
    auto const before = made.left_out_at(from.now_s);
    auto const passed = static_cast<double>(made.left_out_at(from.now_s + unwatched_s) - before);
    double const margin_s = its.margin_s * std::sqrt(1.0 + passed);
    if (passed > 0.0 &&
        (passed > static_cast<double>(remembered) || margin_s > reach * its.period_s)) {
      *this = period_estimator{};  // nobody knows its phase, or what came
      return;
    }
    made.found_->is.margin_s = margin_s;
    unwatched_s = std::max(0.0, unwatched_s - passed * its.period_s);
  }
  made.first_ = now - seconds{from.now_s + unwatched_s};
  *this = made;
}

void period_estimator::check(kept_state const& from, seconds age) {
  auto const is_time = [](double value) { return value >= 0.0 && value <= longest_ago_s; };
  auto const refuse_unless = [](bool right, char const* what) {
    if (!right) {
      throw std::invalid_argument(what);
    }
  };
  refuse_unless(from.by_silence.size() == silences, "there are five lengths of silence");
  refuse_unless(is_time(age.count()) && is_time(from.last_s) && is_time(from.now_s) &&
                    from.last_s <= from.now_s,
                "no request can have come after now");
  for (auto const& each : from.by_silence) {
    auto const& begins = each.begins;
    refuse_unless(
        begins.size() == std::min<std::uint64_t>(each.number, remembered) && !begins.empty(),
        "of bunches the last ones are kept");
    refuse_unless(std::all_of(begins.begin(), begins.end(), is_time) &&
                      begins.back() <= from.last_s && std::is_sorted(begins.begin(), begins.end()),
                  "bunches begin one after the other");
    refuse_unless(is_time(each.in_last) && is_time(each.requests) && is_time(each.span_s) &&
                      is_time(each.longest_quiet_s) && is_time(each.longest_before_s),
                  "what bunches were like must be numbers >= 0");
  }
  if (from.found) {
    auto const& its = *from.found;
    refuse_unless(its.silence < silences, "there are five lengths of silence");
    refuse_unless(its.period_s > 0.0 && is_time(its.period_s) && is_time(its.margin_s) &&
                      its.margin_s <= its.period_s && its.next_s >= 0.0 && is_time(its.next_s),
                  "a period must be longer than nothing, and than what its bunches are off by");
    refuse_unless(its.bunches >= 1.0 && is_time(its.bunches) && is_time(its.unexpected) &&
                      its.unexpected <= its.bunches && is_time(its.periods) &&
                      is_time(its.left_out) && its.left_out <= its.periods,
                  "of bunches, and of periods, a part is unexpected, and left out");
  }
}

}  // namespace sluice::scheduler
