#include "runtime/telemetry/recurring_lines.hpp"

#include <algorithm>
#include <utility>

namespace sluice::telemetry {

bool recurring_lines::take_line(clock::time_point now) {
  auto const since = refilled_.value_or(now);
  auto const more = static_cast<std::size_t>(std::max((now - since) / refill, std::int64_t{0}));
  lines_ = std::min(most_at_once, lines_ + more);
  refilled_ = lines_ == most_at_once ? now : since + static_cast<std::int64_t>(more) * refill;
  if (lines_ == 0) {
    return false;
  }
  --lines_;
  return true;
}

recurring_lines::known& recurring_lines::find(std::string_view text, clock::time_point now) {
  auto const found = std::find_if(known_.begin(), known_.end(),
                                  [text](known const& each) { return each.text == text; });
  if (found != known_.end()) {
    known_.splice(known_.begin(), known_, found);
    return known_.front();
  }
  if (known_.size() == most_known) {
    known_.pop_back();
  }
  return known_.emplace_front(known{std::string{text}, now});
}

std::optional<recurring_lines::line> recurring_lines::on(std::string_view text,
                                                         clock::time_point now) {
  auto& it = find(text, now);
  bool const is_new = it.pause == decltype(it.pause)::zero();
  if (now < it.next_line || !take_line(now)) {
    ++(is_new ? others_ : it.repeated);
    return std::nullopt;
  }
  it.pause = is_new ? first_pause : std::min(2 * it.pause, longest_pause);
  it.next_line = now + it.pause;
  return line{std::exchange(it.repeated, 0), std::exchange(others_, 0)};
}

}  // namespace sluice::telemetry
