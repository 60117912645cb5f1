#include "scheduler/agenda.hpp"

namespace sluice::scheduler {

void agenda::want(std::size_t model) {
  if (is_wanted_.at(model) == 0) {
    is_wanted_[model] = 1;
    wanted_.push_back(static_cast<std::uint32_t>(model));
  }
}

void agenda::want_at(std::size_t model, instant when) {
  forget_time(model);
  if (when < instant::max()) {
    times_.push_back({});
    put(times_.size() - 1, {when, static_cast<std::uint32_t>(model)});
    sift(times_.size() - 1);
  }
}

void agenda::put(std::size_t place, timed const& what) {
  times_[place] = what;
  places_[what.model] = static_cast<std::uint32_t>(place);
}

void agenda::forget_time(std::size_t model) {
  auto const place = places_.at(model);
  if (place == nowhere) {
    return;
  }
  places_[model] = nowhere;
  auto const last = times_.back();
  times_.pop_back();
  if (place < times_.size()) {
    put(place, last);
    sift(place);
  }
}

/// To where it is later than what is above it, and not later than what is below.
void agenda::sift(std::size_t place) {
  auto const moved = times_[place];
  while (place > 0 && moved.when < times_[(place - 1) / 2].when) {
    put(place, times_[(place - 1) / 2]);
    place = (place - 1) / 2;
  }
  for (std::size_t below = 2 * place + 1; below < times_.size(); below = 2 * place + 1) {
    if (below + 1 < times_.size() && times_[below + 1].when < times_[below].when) {
      ++below;
    }
    if (!(times_[below].when < moved.when)) {
      break;
    }
    put(place, times_[below]);
    place = below;
  }
  put(place, moved);
}

}  // namespace sluice::scheduler
