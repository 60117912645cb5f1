#include "scheduler/reserve.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {

namespace {

// Between W and 2W are kept free.
constexpr double kept_of_size = 1.5;
constexpr double staying = 0.1;
constexpr double least_fraction = 1e-6;

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t chunk) noexcept {
  std::uint64_t const rest = bytes % chunk;
  if (rest == 0) {
    return bytes;
  }
  std::uint64_t const whole = bytes - rest;
  return whole > std::numeric_limits<std::uint64_t>::max() - chunk ? whole : whole + chunk;
}

constexpr std::size_t steps = 128;
// More starts at once than that are as many as there may be.
constexpr double most_expected = 500.0;

/// Cold starts that need so many steps.
struct class_of_starts {
  std::size_t need = 0;
  double expected = 0.0;  ///< while the reserve is filled again
  double brings = 0.0;    ///< requests into time, a second, if each finds its bytes
};

std::vector<class_of_starts> cold_starts_of(std::span<cold_model const> models, double step,
                                            seconds refill) {
  std::array<class_of_starts, steps + 1> by_need{};
  for (auto const& m : models) {
    double const need = std::ceil(static_cast<double>(m.bytes) / step * (1.0 - least_fraction));
    if (need >= 1.0 && need <= static_cast<double>(steps)) {
      auto& its = by_need[static_cast<std::size_t>(need)];
      its.need = static_cast<std::size_t>(need);
      // A model is one set of weights, however often it starts.
      its.expected += std::min(1.0, m.loads_per_s * refill.count());
      its.brings += m.loads_per_s * m.free_gain;
    }
  }
  std::vector<class_of_starts> result;
  std::copy_if(by_need.begin(), by_need.end(), std::back_inserter(result),
               [](auto const& each) { return each.need > 0; });
  return result;
}

/// P(what starts needs at most so many steps).
std::array<double, steps + 1> poisson_sums(std::vector<class_of_starts> const& starts) {
  double const all =
      std::accumulate(starts.begin(), starts.end(), 0.0,
                      [](double sum, auto const& each) { return sum + each.expected; });
  double const scale = all > most_expected ? most_expected / all : 1.0;
  std::array<double, steps + 1> mass{};
  mass[0] = std::exp(-scale * all);
  for (std::size_t j = 1; j <= steps; ++j) {
    double sum = 0.0;
    for (auto const& each : starts) {
      if (each.need <= j) {
        sum += static_cast<double>(each.need) * each.expected * mass[j - each.need];
      }
    }
    mass[j] = scale * sum / static_cast<double>(j);
  }
  std::partial_sum(mass.begin(), mass.end(), mass.begin());
  return mass;
}

}  // namespace

reserve::reserve(std::uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
  if (chunk_bytes == 0) {
    throw std::invalid_argument("the chunk size must be > 0 bytes");
  }
}

reserve::move reserve::update(input const& now) noexcept {
  std::uint64_t const low = rounded_up(now.size_bytes, chunk_bytes_);
  std::uint64_t const high = low > std::numeric_limits<std::uint64_t>::max() / 2 ? low : 2 * low;
  refilling_ = now.free_bytes < low || (refilling_ && now.free_bytes < high);
  move result{.keep_bytes = now.free_bytes, .refilling = refilling_};
  if (refilling_) {
    result.reclaim_bytes = rounded_up(high - now.free_bytes, chunk_bytes_);
    result.keep_bytes += result.reclaim_bytes;
  } else if (now.free_bytes > high) {
    result.release_bytes = (now.free_bytes - high) / chunk_bytes_ * chunk_bytes_;
    result.keep_bytes -= result.release_bytes;
  }
  return result;
}

/// Nobody waits for a load that is expected.
cold_model cold_model_of(warm_decision const& made, std::uint64_t bytes) noexcept {
  return {.bytes = bytes,
          .loads_per_s = made.prewarm ? made.chosen.exceed * made.long_run_rate_per_s
                                      : made.chosen.loads_per_s,
          .released_fraction = made.chosen.released_fraction,
          .held_gain = std::max(0.0, made.warm_attainment - made.cold_attainment),
          .free_gain = made.free_gain};
}

std::uint64_t reserve_size(std::span<cold_model const> models, std::uint64_t most_bytes,
                           bool is_kept, seconds refill) {
  double all_bytes = 0.0;
  double held_brings =
      0.0;  // requests into time, by a byte of the model that is held to most effect
  for (auto const& m : models) {
    auto const bytes = static_cast<double>(m.bytes);
    all_bytes += bytes;
    if (m.bytes > 0) {
      double const held = std::max(m.released_fraction, least_fraction) * bytes;
      held_brings =
          std::max(held_brings, m.loads_per_s * std::max(m.held_gain, m.free_gain) / held);
    }
  }
  double const most = std::min(all_bytes, static_cast<double>(most_bytes));
  if (!(most > 0.0)) {
    return 0;
  }
  double const step = most / steps;
  auto const starts = cold_starts_of(models, step, refill);
  auto const fits = poisson_sums(starts);
  double const price = held_brings * kept_of_size * step * (is_kept ? 1.0 - staying : 1.0);
  double best = 0.0;
  std::size_t size = 0;
  for (std::size_t w = 1; w <= steps; ++w) {
    double brings = 0.0;
    for (auto const& each : starts) {
      brings += each.need <= w ? each.brings * fits[w - each.need] : 0.0;
    }
    if (double const gain = brings - price * static_cast<double>(w); gain > best) {
      best = gain;
      size = w;
    }
  }
  return size == steps && most < all_bytes
             ? most_bytes
             : static_cast<std::uint64_t>(step * static_cast<double>(size));
}

}  // namespace sluice::scheduler
