#include "scheduler/admission.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <span>

namespace sluice::scheduler {
namespace {

/// What takes longer than so many times as long as nine in ten do counts as that.
constexpr double stands_out = 4.0;
constexpr double nine_in_ten = 0.9;
/// Times have changed where so many in turn are so many times as long as the mean, or as short.
constexpr std::ptrdiff_t longer_in_turn = 5, shorter_in_turn = 8;
constexpr double changed = 2.0;
constexpr double looks_near = 8.0;
/// Beneath what clocks tell apart.
constexpr double rounding = 1e-9;

}  // namespace

void recent_times::add(seconds took, std::size_t times) {
  times_.insert(times_.end(), std::min(times, remembered), std::max(took.count(), 0.0));
  while (times_.size() > remembered) {
    times_.pop_front();
  }
  if (!known_ && times_.size() < enough) {
    return;
  }
  forget_if_changed();
  std::array<double, remembered> space{};
  auto const end = std::copy(times_.begin(), times_.end(), space.begin());
  std::span const values{space.begin(), end};
  auto const count = static_cast<double>(values.size());
  auto const place =
      values.begin() + static_cast<std::ptrdiff_t>(std::ceil(nine_in_ten * count)) - 1;
  std::nth_element(values.begin(), place, values.end());
  auto const highest = stands_out * *place;
  estimate now{.least = *std::min_element(values.begin(), place + 1)};
  for (auto& each : values) {
    each = std::min(each, highest);
    now.mean += each / count;
  }
  for (auto const each : values) {
    now.variance += (each - now.mean) * (each - now.mean) / count;
  }
  now.doubt = std::sqrt(now.variance / count);
  known_ = now;
}

void recent_times::forget_if_changed() {
  auto const forget_all_but = [this](std::ptrdiff_t last, auto has_changed) {
    auto const first = times_.end() - std::min(last, std::ssize(times_));
    if (times_.end() - first == last && std::all_of(first, times_.end(), has_changed)) {
      times_.erase(times_.begin(), first);
    }
  };
  if (known_) {
    forget_all_but(longer_in_turn, [this](double each) { return each > changed * known_->mean; });
    forget_all_but(shorter_in_turn, [this](double each) { return each * changed < known_->mean; });
  }
}

admission::admission(std::size_t models, lines how)
    : lines_(how), queues_(how == lines::one_for_all ? 1 : models), times_(models) {}

admission::verdict admission::ask(std::size_t model, instant now, instant deadline,
                                  sight const& host) {
  look(pending_of(model), now, host);
  auto const& own = times_.at(model).warm.known();
  auto const first = own ? before(model, now, host) : std::nullopt;
  if (!first) {
    return {};
  }
  auto const doubt = first->doubt + own->doubt;
  auto const end =
      first->mean + own->mean + margin * std::sqrt(first->variance + own->variance + doubt * doubt);
  auto const beyond = end - (deadline - now).count();
  bool const admitted = beyond <= rounding;
  return {admitted, seconds{end}, seconds{admitted ? 0.0 : beyond}};
}

admission::work admission::of_warm(std::size_t model) const {
  auto const& known = times_.at(model).warm.known();
  return known ? work{known->mean, known->variance, known->doubt} : work{};
}

/// What is left of it.
void admission::pass(work& takes, instant since, instant now) {
  takes.mean -= std::max(0.0, (now - since).count());
  takes = takes.mean > 0.0 ? takes : work{};
}

std::optional<admission::work> admission::before(std::size_t model, instant now,
                                                 sight const& host) const {
  auto const& line = pending_of(model);
  std::optional<work> sum;
  if (line.before) {
    sum = of_warm(line.before->model);
    pass(*sum, line.before->began, now);
  }
  std::set<std::size_t> seen;
  std::size_t counted = 0;
  for (auto next = line.requests.begin(); next != line.requests.end() && counted < most_counted;
       ++next, ++counted) {
    auto const& each = next->second;
    bool const is_first_of_its = seen.insert(each.model).second;
    bool const is_warm = host.is_warm(each.model);
    // Others go before a model whose weights have to be read first.
    if (each.is_cancelled || (each.model != model && !is_warm)) {
      continue;
    }
    sum = sum.value_or(work{});
    auto takes = of_warm(each.model);
    if (auto const& cold = times_.at(each.model).cold.known();
        is_first_of_its && !is_warm && cold) {
      takes = {cold->least, 0.0, 0.0};
    }
    if (next == line.requests.begin() && !line.before) {
      pass(takes, std::max(each.since, line.free_since), now);
    }
    if (sum->mean <
        (each.deadline - now).count()) {  // else its own time is over before it is begun
      sum->mean += takes.mean;
      sum->variance += takes.variance;
      sum->doubt += takes.doubt;
    }
  }
  return sum;
}

void admission::look(pending& line, instant now, sight const& host) {
  if (!line.before) {
    return;
  }
  auto const& it = *line.before;
  if (host.computed_since(it.which)) {
    line.before->seen = now;
    return;
  }
  auto const next =
      line.requests.empty() ? std::nullopt : host.computed_since(line.requests.begin()->first);
  // Between two looks, unless they are so far apart that this says little.
  bool const is_near = now - it.seen <= (it.seen - it.began) / looks_near;
  auto const end = next.value_or(is_near ? now : it.seen);
  times_of(it.model, it.is_cold).add(end - it.began);
  line.free_since = next.value_or(now);
  line.before.reset();
}

recent_times& admission::times_of(std::size_t model, bool is_cold) {
  auto& its = times_.at(model);
  return is_cold ? its.cold : its.warm;
}

void admission::add(std::size_t model, ticket which, instant now, instant deadline,
                    sight const& host) {
  auto& line = pending_of(model);
  bool const is_first =
      std::none_of(line.requests.begin(), line.requests.end(),
                   [model](auto const& each) { return each.second.model == model; });
  line.requests.emplace(which, waiting{.model = model,
                                       .since = now,
                                       .deadline = deadline,
                                       .is_cold = is_first && !host.is_warm(model)});
}

void admission::cancel(std::size_t model, ticket which) {
  auto& line = pending_of(model);
  if (auto const found = line.requests.find(which); found != line.requests.end()) {
    found->second.is_cancelled = true;
  }
}

void admission::on_answer(std::size_t model, ticket which, instant now, std::size_t together) {
  auto& line = pending_of(model);
  auto const found = line.requests.find(which);
  if (found == line.requests.end()) {
    return;
  }
  if (!line.is_unsure && !line.before && together > 0) {
    auto const took = now - std::max(found->second.since, line.free_since);
    times_of(model, found->second.is_cold).add(took / static_cast<double>(together), together);
  }
  line.is_unsure = false;
  line.before.reset();  // it has ended before this one was begun
  line.free_since = now;
  line.requests.erase(found);
}

void admission::remove(std::size_t model, ticket which, instant now, sight const& host) {
  auto& line = pending_of(model);
  auto const found = line.requests.find(which);
  if (found == line.requests.end()) {
    return;
  }
  look(line, now, host);
  if (auto const began = host.computed_since(which)) {
    line.before = unheard{.which = which,
                          .model = model,
                          .began = *began,
                          .seen = now,
                          .is_cold = found->second.is_cold};
  } else if (found == line.requests.begin() && !line.before) {
    line.free_since = now;  // the next has not been begun before
  }
  line.requests.erase(found);
}

void admission::extend(std::size_t models) {
  if (lines_ == lines::one_for_each_model) {
    queues_.resize(std::max(models, queues_.size()));
  }
  times_.resize(std::max(models, times_.size()));
}

void admission::forget(std::size_t model) {
  times_.at(model) = {};
  if (lines_ == lines::one_for_each_model) {
    queues_.at(model) = {};
  }
}

void admission::restart(instant now) {
  for (auto& each : queues_) {
    each.is_unsure = true;
    each.before.reset();
    each.free_since = now;
  }
}

}  // namespace sluice::scheduler
