#include "runtime/simulator/model_shares.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "memhandover/base/error.hpp"

namespace sluice::simulator {

model_shares::model_shares(std::uint32_t models, double exponent) {
  if (models == 0) {
    throw error{error_kind::invalid_argument, "there must be at least one model"};
  }
  if (!(exponent >= 0.0) || !std::isfinite(exponent)) {
    throw error{error_kind::invalid_argument,
                fmt::format("Zipf's exponent is {}, must be 0 or more", exponent)};
  }
  double sum = 0.0;
  for (std::uint32_t k = 1; k <= models; ++k) {
    up_to_.push_back(sum += std::pow(k, -exponent));
  }
}

std::uint32_t model_shares::draw(draws& random) const {
  if (up_to_.size() == 1) {
    return 0;
  }
  double const at = random.uniform() * up_to_.back();
  auto const found = std::upper_bound(up_to_.begin(), up_to_.end() - 1, at);
  return static_cast<std::uint32_t>(found - up_to_.begin());
}

}  // namespace sluice::simulator
