#include "runtime/gate/run_ahead.hpp"

#include <algorithm>
#include <cmath>

namespace sluice::gate {
namespace {

/// From the driver's call to the first instruction on an idle device.
constexpr std::int64_t launch_latency_ns = 4'000;
/// So long before the end of the unit that is executing the next one is given to the device, however
/// long it is: that, and by how much the prediction for one unit may be wrong.
constexpr std::int64_t shortest_lead_ns = launch_latency_ns + 16'000;

constexpr std::int64_t lead_ns(std::chrono::nanoseconds takes, std::chrono::nanoseconds bound) {
  std::int64_t const lead = takes <= 2 * bound ? bound.count() / 3 : 0;
  return std::min(std::max(shortest_lead_ns, lead), bound.count());
}

/// Two looks at an event with so little time between them tell when it happened.
constexpr std::int64_t close_looks_ns = 20'000;
/// Of a group that teaches something.
constexpr unsigned fewest_launches = 4;
constexpr double fading = 1.0 - 1.0 / 32;
constexpr double largest_correction_ns = 10'000;
constexpr std::chrono::nanoseconds shortest{500};

}  // namespace

run_ahead::nanoseconds run_ahead::corrected(nanoseconds takes) const noexcept {
  return std::max(shortest, takes + correction_);
}

bool run_ahead::has_room(std::int64_t now, nanoseconds takes, nanoseconds bound) noexcept {
  while (!unit_ends_.empty() && unit_ends_.front() + shifted_ns_ <= now) {
    unit_ends_.pop_front();
  }
  if (unit_ends_.empty()) {
    return true;
  }
  auto executing_until = unit_ends_.front() + shifted_ns_;
  if (!markers_.empty()) {  // what lies before an event that is late has not ended
    executing_until = std::min(executing_until, markers_.front().end_ns);
  }
  auto const behind = end_ns_ - executing_until;
  return behind + corrected(takes).count() <= bound.count() ||
         (behind <= 0 && executing_until - now <= lead_ns(takes, bound));
}

bool run_ahead::should_ask(std::int64_t now, nanoseconds takes, nanoseconds bound) noexcept {
  return !markers_.empty() && (markers_.front().end_ns <= now || !has_room(now, takes, bound));
}

group_marker run_ahead::completed(std::int64_t now) {
  group_marker const oldest = markers_.front();
  markers_.pop_front();
  bool const watched = oldest.asked_ns != 0 && now - oldest.asked_ns <= close_looks_ns;
  if (watched && seen_ns_ != 0 && oldest.unbroken && oldest.measures == 0) {
    learn(oldest, now - seen_ns_);
  }
  seen_ns_ = watched ? now : 0;
  if (oldest.end_ns > now) {
    shift(now - oldest.end_ns);  // the device is ahead of what was predicted
  }
  return oldest;
}

void run_ahead::learn(group_marker const& from, std::int64_t took) noexcept {
  auto const error = static_cast<double>(took - from.measured_ns);
  bool const likely =
      std::abs(error) < static_cast<double>(took);  // else something else ran as well
  if (from.launches < fewest_launches || !likely) {
    return;
  }
  error_ns_ = error_ns_ * fading + error;
  launches_ = launches_ * fading + from.launches;
  correction_ = nanoseconds{static_cast<std::int64_t>(
      std::clamp(error_ns_ / launches_, -largest_correction_ns, largest_correction_ns))};
}

void run_ahead::is_late(std::int64_t now) noexcept {
  markers_.front().asked_ns = now;
  if (markers_.front().end_ns <= now) {
    shift(now + 1 - markers_.front().end_ns);
  }
}

void run_ahead::shift(std::int64_t by) noexcept {
  end_ns_ += by;
  shifted_ns_ += by;
  for (group_marker& marker : markers_) {
    marker.end_ns += by;
  }
}

void run_ahead::launched(std::int64_t now, nanoseconds takes) noexcept {
  unbroken_ = unbroken_ && end_ns_ > now;
  end_ns_ = std::max(end_ns_, now + launch_latency_ns) + corrected(takes).count();
  unit_ends_.push_back(end_ns_ - shifted_ns_);
  unmarked_work_ += corrected(takes);
  unmarked_measured_ns_ += takes.count();
  ++unmarked_;
}

void run_ahead::marked(std::int64_t now, group_marker const& by) {
  end_ns_ = std::max(end_ns_, now);
  group_marker& made = markers_.emplace_back(by);
  made.end_ns = end_ns_;
  made.alone = unmarked_ == 1;
  made.launches = unmarked_;
  made.measured_ns = unmarked_measured_ns_;
  made.unbroken = unbroken_;
  begin_group();
}

void run_ahead::begin_group() noexcept {
  unmarked_work_ = nanoseconds::zero();
  unmarked_measured_ns_ = 0;
  unmarked_ = 0;
  unbroken_ = true;
}

void run_ahead::forget_unmarked(std::int64_t now) noexcept {
  end_ns_ = markers_.empty() ? now : markers_.back().end_ns;
  while (!unit_ends_.empty() && unit_ends_.back() + shifted_ns_ > end_ns_) {
    unit_ends_.pop_back();
  }
  begin_group();
}

std::optional<group_marker> run_ahead::clear() noexcept {
  if (markers_.empty()) {
    end_ns_ = 0;
    unit_ends_.clear();
    seen_ns_ = 0;
    begin_group();
    return std::nullopt;
  }
  group_marker const oldest = markers_.front();
  markers_.pop_front();
  return oldest;
}

}  // namespace sluice::gate
