#include "runtime/gate/run_ahead.hpp"

#include <algorithm>

namespace sluice::gate {
namespace {

/// From the driver's call to the first instruction on an idle device.
constexpr std::int64_t launch_latency_ns = 4'000;
/// So long before the end of the unit that is executing the next one is given to the device, however
/// long it is: that, and by how much the prediction for one unit may be wrong.
constexpr std::int64_t lead_ns = launch_latency_ns + 16'000;

}  // namespace

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
  return behind + takes.count() <= bound.count() ||
         (behind <= 0 && executing_until - now <= std::min(lead_ns, bound.count()));
}

bool run_ahead::should_ask(std::int64_t now, nanoseconds takes, nanoseconds bound) noexcept {
  return !markers_.empty() && (markers_.front().end_ns <= now || !has_room(now, takes, bound));
}

group_marker run_ahead::happened(std::int64_t now) {
  group_marker const oldest = markers_.front();
  markers_.pop_front();
  if (oldest.end_ns > now) {
    shift(now - oldest.end_ns);  // the device is ahead of what was predicted
  }
  return oldest;
}

void run_ahead::is_late(std::int64_t now) noexcept {
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
  end_ns_ = std::max(end_ns_, now + launch_latency_ns) + takes.count();
  unit_ends_.push_back(end_ns_ - shifted_ns_);
  unmarked_work_ += takes;
  ++unmarked_;
}

void run_ahead::marked(std::int64_t now, void* event, work_key measures) {
  end_ns_ = std::max(end_ns_, now);
  markers_.push_back({event, end_ns_, unmarked_ == 1, measures});
  unmarked_work_ = nanoseconds::zero();
  unmarked_ = 0;
}

void run_ahead::forget_unmarked(std::int64_t now) noexcept {
  end_ns_ = markers_.empty() ? now : markers_.back().end_ns;
  while (!unit_ends_.empty() && unit_ends_.back() + shifted_ns_ > end_ns_) {
    unit_ends_.pop_back();
  }
  unmarked_work_ = nanoseconds::zero();
  unmarked_ = 0;
}

std::optional<group_marker> run_ahead::clear() noexcept {
  if (markers_.empty()) {
    end_ns_ = 0;
    unit_ends_.clear();
    unmarked_work_ = nanoseconds::zero();
    unmarked_ = 0;
    return std::nullopt;
  }
  group_marker const oldest = markers_.front();
  markers_.pop_front();
  return oldest;
}

}  // namespace sluice::gate
