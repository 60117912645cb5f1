#include "runtime/simulator/draws.hpp"

#include <cmath>
#include <numbers>

namespace sluice::simulator {

double draws::uniform() {
  constexpr unsigned unused_bits = 11;  // a double has 53
  return (static_cast<double>(state_() >> unused_bits) + 0.5) * 0x1p-53;
}

double draws::exponential(double mean) {
  return -mean * std::log(uniform());
}

double draws::normal() {
  double const radius = std::sqrt(-2.0 * std::log(uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

// Marsaglia and Tsang, ACM Transactions on Mathematical Software 26 (2000); for shapes below one a power of a uniform number on top.
double draws::gamma(double mean, double scv) {
  if (scv <= 0.0 || mean <= 0.0) {
    return mean;
  }
  if (scv == 1.0) {
    return exponential(mean);
  }
  double const shape = 1.0 / scv;
  double const scale = mean * scv;
  double const lifted = shape < 1.0 ? shape + 1.0 : shape;
  double const d = lifted - 1.0 / 3.0;
  double const c = 1.0 / std::sqrt(9.0 * d);
  for (;;) {
    double const x = normal();
    double const v = std::pow(1.0 + c * x, 3.0);
    if (v > 0.0 && std::log(uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) {
      double const lower = shape < 1.0 ? std::pow(uniform(), scv) : 1.0;
      return d * v * scale * lower;
    }
  }
}

double draws::log_normal(double mean, double scv) {
  double const variance = std::log1p(scv);
  return mean * std::exp(std::sqrt(variance) * normal() - 0.5 * variance);
}

}  // namespace sluice::simulator
