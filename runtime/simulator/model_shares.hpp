/// Which model a request is for, by Zipf's distribution: the k-th has a share in proportion to k^−exponent. 0: all the same.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/simulator/draws.hpp"

namespace sluice::simulator {

class model_shares {
 public:
  /// Throws `invalid_argument` for no models, or an exponent that is negative or no number.
  model_shares(std::uint32_t models, double exponent);

  [[nodiscard]] std::uint32_t draw(draws& random) const;

 private:
  std::vector<double> up_to_;  ///< sums of shares
};

}  // namespace sluice::simulator
