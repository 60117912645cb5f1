#include "scheduler/parallelism.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace sluice::scheduler {
namespace {

/// Of each mean the last so many count.
constexpr std::uint64_t remembered = 64;
constexpr std::uint64_t enough = 16;
/// A model with less company than this was alone.
constexpr double alone_below = 1.1;

}  // namespace

void parallelism::mean::add(double one) {
  count = std::min(count + 1, remembered);
  value += (one - value) / static_cast<double>(count);
}

parallelism::parallelism(std::size_t most) : most_(most), bound_(most), slowdown_(most) {
  if (most == 0) {
    throw std::invalid_argument("at least one model has to compute at once; got 0");
  }
}

void parallelism::add(std::size_t model, double at_once, seconds took) {
  if (!(took.count() > 0.0) || !(at_once >= 1.0)) {
    return;  // clocks that stood still say nothing
  }
  if (at_once < alone_below) {
    alone_[model].add(took.count());
  } else if (auto const alone = alone_.find(model);
             alone != alone_.end() && alone->second.count >= enough) {
    auto const place = std::min(static_cast<std::size_t>(std::lround(at_once)), most_) - 1;
    // By its share of the company, so that 1.6 and 2.4 at once are not taken for the same.
    auto const for_whole = 1.0 + (took.count() / alone->second.value - 1.0) *
                                     static_cast<double>(place) / (at_once - 1.0);
    slowdown_[place].add(std::max(for_whole, 1.0));
  }
  auto const before = bound_;
  bound_ = largest_that_yields();
  if (bound_ != before) {
    since_change_ = 0;
  } else if (bound_ < most_ && ++since_change_ >= tried_again) {
    slowdown_[bound_] = {};
    since_change_ = 0;
    bound_ = largest_that_yields();
  }
}

std::vector<double> parallelism::slowdowns() const {
  std::vector<double> result;
  result.reserve(bound_);
  for (std::size_t i = 0; i < bound_; ++i) {
    result.push_back(slowdown_[i].count >= enough ? slowdown_[i].value : 1.0);
  }
  return result;
}

std::optional<seconds> parallelism::alone(std::size_t model) const {
  auto const found = alone_.find(model);
  return found != alone_.end() && found->second.count >= enough
             ? std::optional{seconds{found->second.value}}
             : std::nullopt;
}

std::size_t parallelism::largest_that_yields() const {
  std::size_t number = 1;
  while (number < most_) {
    auto const& next = slowdown_[number];
    if (next.count >= enough && static_cast<double>(number + 1) / next.value < least_yield) {
      break;
    }
    ++number;
  }
  return number;
}

}  // namespace sluice::scheduler
