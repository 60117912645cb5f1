#include "runtime/server/hosting/batch_choice.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace sluice::server {
namespace {

/// The places of those that can be computed with the first, it included, and what is known of them together.
struct candidates {
  std::vector<std::size_t> places;
  std::int64_t samples = 0;
  std::size_t preferred = 0;  ///< so many of them have a preferred size; 0: there is none
  bool is_full = false;       ///< or somebody waits who does not fit
};

candidates beside_the_first(std::span<waiting_request const> line,
                            std::vector<std::size_t> const& order, batching_rules const& rules) {
  candidates found;
  auto const& first = line[order.front()];
  for (auto const place : order) {
    auto const& each = line[place];
    bool const is_first = found.places.empty();
    bool const fits = each.samples <= rules.max_batch_size - found.samples;
    if (!is_first && (each.is_alone || each.shape != first.shape || !fits)) {
      found.is_full = found.is_full || (!each.is_alone && each.shape == first.shape);
      if (rules.preserve_ordering) {
        found.is_full = true;  // who comes behind it may not go before it
        break;
      }
      continue;
    }
    found.places.push_back(place);
    found.samples += each.samples;
    if (std::binary_search(rules.preferred_sizes.begin(), rules.preferred_sizes.end(),
                           found.samples)) {
      found.preferred = found.places.size();
    }
    if (first.is_alone) {
      found.is_full = true;
      break;
    }
  }
  found.is_full = found.is_full || found.samples >= rules.max_batch_size;
  return found;
}

}  // namespace

batch_choice choose_batch(std::span<waiting_request const> line, batching_rules const& rules,
                          waiting_request::time_point now, std::chrono::nanoseconds computation) {
  if (line.empty()) {
    return {};
  }
  std::vector<std::size_t> order(line.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple{line[a].is_late, line[a].priority} <
           std::tuple{line[b].is_late, line[b].priority};
  });
  if (!rules.is_dynamic) {
    return {{order.front()}, std::nullopt};
  }
  auto found = beside_the_first(line, order, rules);
  if (found.preferred > 0) {
    found.places.resize(found.preferred);
  } else if (!found.is_full) {
    auto until = waiting_request::time_point::max();
    for (auto const place : found.places) {
      auto const& each = line[place];
      until = std::min({until, each.arrival + rules.max_queue_delay, each.deadline - computation,
                        each.arrival + (each.deadline - each.arrival) / 2});
    }
    if (until > now) {
      return {{}, until};
    }
  }
  return {std::move(found.places), std::nullopt};
}

}  // namespace sluice::server
