#include "scheduler/eviction.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>

namespace sluice::scheduler {
namespace {

// A set is as cheap as any of those that are not looked at, before the needless are left out.
constexpr std::size_t most_compared = 32;

double loss_of(resident_model const& model) noexcept {
  return model.loss_per_s > 0.0 ? std::min(model.loss_per_s, std::numeric_limits<double>::max())
                                : 0.0;
}

double loss_of_a_byte(resident_model const& model) noexcept {
  return loss_of(model) / static_cast<double>(model.bytes);
}

std::uint64_t sum_of(std::uint64_t a, std::uint64_t b) noexcept {
  return a > std::numeric_limits<std::uint64_t>::max() - b
             ? std::numeric_limits<std::uint64_t>::max()
             : a + b;
}

std::uint64_t bytes_of(std::span<resident_model const> models,
                       std::vector<std::size_t> const& places) noexcept {
  return std::accumulate(
      places.begin(), places.end(), std::uint64_t{0},
      [&](std::uint64_t sum, std::size_t each) { return sum_of(sum, models[each].bytes); });
}

double loss_of(std::span<resident_model const> models,
               std::vector<std::size_t> const& places) noexcept {
  return std::accumulate(places.begin(), places.end(), 0.0,
                         [&](double sum, std::size_t each) { return sum + loss_of(models[each]); });
}

/// Those that could stay do, the costliest first.
void leave_out_needless(std::vector<std::size_t>& places, std::span<resident_model const> models,
                        std::uint64_t wanted) {
  auto by_loss = places;
  std::stable_sort(by_loss.begin(), by_loss.end(), [&](std::size_t a, std::size_t b) {
    return loss_of(models[a]) > loss_of(models[b]);
  });
  // What the sum is above the limit of a number is not there to be taken from.
  auto spare = bytes_of(models, places) - wanted;
  std::vector<std::size_t> needless;
  for (auto const each : by_loss) {
    if (models[each].bytes <= spare) {
      spare -= models[each].bytes;
      needless.push_back(each);
    }
  }
  std::sort(needless.begin(), needless.end());
  std::erase_if(places, [&](std::size_t each) {
    return std::binary_search(needless.begin(), needless.end(), each);
  });
}

/// Of `order`, by what a byte costs: each that would complete what comes before makes a set, and is then left out. Of those that cost
/// least the needless are left out before they are compared.
std::vector<std::size_t> cheapest(std::span<resident_model const> models,
                                  std::vector<std::size_t> const& order, std::uint64_t wanted) {
  struct completion {
    double loss = 0.0;
    std::size_t before = 0;  // of those that are not enough
    std::size_t last = 0;
  };
  std::vector<std::size_t> growing;
  std::vector<completion> found;
  std::uint64_t bytes = 0;
  double loss = 0.0;
  for (auto const each : order) {
    auto const with = sum_of(bytes, models[each].bytes);
    if (with >= wanted) {
      found.push_back({loss + loss_of(models[each]), growing.size(), each});
      continue;
    }
    growing.push_back(each);
    bytes = with;
    loss += loss_of(models[each]);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](completion const& a, completion const& b) { return a.loss < b.loss; });
  found.resize(std::min(found.size(), most_compared));
  std::vector<std::size_t> best;
  double least = std::numeric_limits<double>::infinity();
  for (auto const& each : found) {
    std::vector<std::size_t> set{growing.begin(),
                                 growing.begin() + static_cast<std::ptrdiff_t>(each.before)};
    set.push_back(each.last);
    leave_out_needless(set, models, wanted);
    if (double const of_set = loss_of(models, set); best.empty() || of_set < least) {
      least = of_set;
      best = std::move(set);
    }
  }
  return best;
}

}  // namespace

std::vector<std::size_t> models_to_release(std::span<resident_model const> models,
                                           std::uint64_t bytes) {
  std::vector<std::size_t> order;
  for (bool const busy : {false, true}) {
    // Of those with requests as many as are wanted beyond all others.
    std::vector<std::size_t> chosen = busy ? order : std::vector<std::size_t>{};
    std::uint64_t const others = bytes_of(models, chosen);
    order.clear();
    for (std::size_t place = 0; place < models.size(); ++place) {
      if (models[place].bytes > 0 && models[place].has_requests == busy) {
        order.push_back(place);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      double const here = loss_of_a_byte(models[a]);
      double const there = loss_of_a_byte(models[b]);
      return here != there ? here < there : models[a].idle > models[b].idle;
    });
    auto const best = cheapest(models, order, bytes - std::min(bytes, others));
    if (!best.empty()) {
      chosen.insert(chosen.end(), best.begin(), best.end());
      leave_out_needless(chosen, models, bytes);
      return chosen;
    }
  }
  return {};
}

}  // namespace sluice::scheduler
