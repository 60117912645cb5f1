#include "memhandover/allocation/detail/chunk_runs.hpp"

#include <algorithm>

namespace sluice::memhandover::detail {

chunk_runs::chunk_runs(std::span<std::uint32_t const> chunks) {
  for (auto const chunk : chunks) {
    if (!runs_.empty() && runs_.back().first + runs_.back().count == chunk) {
      ++runs_.back().count;
    } else {
      put_back({chunk, 1});
    }
  }
}

std::uint32_t chunk_runs::longest() const noexcept {
  std::uint32_t most = 0;
  for (auto const& each : runs_) {
    most = std::max(most, each.count);
  }
  return most;
}

chunk_run chunk_runs::take(std::uint32_t count) {
  auto best = runs_.begin();
  for (auto each = runs_.begin(); each != runs_.end(); ++each) {
    bool const fits = each->count >= count;
    bool const best_fits = best->count >= count;
    if (fits ? !best_fits || each->count < best->count : !best_fits && each->count > best->count) {
      best = each;
    }
  }
  return take_from(best, count);
}

chunk_run chunk_runs::take_from_shortest(std::uint32_t count) {
  return take_from(std::min_element(runs_.begin(), runs_.end(),
                                    [](auto const& a, auto const& b) { return a.count < b.count; }),
                   count);
}

chunk_run chunk_runs::take_from(std::vector<chunk_run>::iterator run, std::uint32_t count) {
  if (run == runs_.end()) {
    return {};
  }
  chunk_run const taken{run->first, std::min(run->count, count)};
  run->first += taken.count;
  run->count -= taken.count;
  if (run->count == 0) {
    runs_.erase(run);
  }
  return taken;
}

void chunk_runs::put_back(chunk_run run) {
  if (run.count == 0) {
    return;
  }
  auto next = std::lower_bound(runs_.begin(), runs_.end(), run.first,
                               [](auto const& each, auto first) { return each.first < first; });
  bool const joins_next = next != runs_.end() && run.first + run.count == next->first;
  if (joins_next) {
    next->first = run.first;
    next->count += run.count;
  }
  if (next != runs_.begin()) {
    if (auto const previous = std::prev(next); previous->first + previous->count == run.first) {
      previous->count += joins_next ? next->count : run.count;
      if (joins_next) {
        runs_.erase(next);
      }
      return;
    }
  }
  if (!joins_next) {
    runs_.insert(next, run);
  }
}

}  // namespace sluice::memhandover::detail
