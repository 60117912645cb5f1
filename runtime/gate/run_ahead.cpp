#include "runtime/gate/run_ahead.hpp"

#include <algorithm>

namespace sluice::gate {
namespace {

/// From the driver's call to the first instruction on an idle device.
constexpr std::int64_t launch_latency_ns = 4'000;

}  // namespace

bool run_ahead::should_ask(std::int64_t now, nanoseconds bound) const noexcept {
  return !markers_.empty() && (markers_.front().end_ns <= now || !has_room(now, bound));
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
  for (group_marker& marker : markers_) {
    marker.end_ns += by;
  }
}

void run_ahead::launched(std::int64_t now, nanoseconds takes) noexcept {
  end_ns_ = std::max(end_ns_, now + launch_latency_ns) + takes.count();
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
  unmarked_work_ = nanoseconds::zero();
  unmarked_ = 0;
}

std::optional<group_marker> run_ahead::clear() noexcept {
  if (markers_.empty()) {
    end_ns_ = 0;
    unmarked_work_ = nanoseconds::zero();
    unmarked_ = 0;
    return std::nullopt;
  }
  group_marker const oldest = markers_.front();
  markers_.pop_front();
  return oldest;
}

}  // namespace sluice::gate
