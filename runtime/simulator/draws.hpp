/// Random numbers that are the same on every machine: the generator is the standard's, and what is made of it is not left to the
/// standard library.
///
///   draws random{7};
///   random.exponential(0.1);       // mean
///   random.gamma(0.1, 0.5);        // mean and squared coefficient of variation
///
/// One thread at a time.
#pragma once

#include <cstdint>
#include <random>

namespace sluice::simulator {

class draws {
 public:
  explicit draws(std::uint64_t seed) : state_(seed) {}

  /// In (0, 1).
  [[nodiscard]] double uniform();
  [[nodiscard]] double exponential(double mean);
  /// Of mean 0 and variance 1.
  [[nodiscard]] double normal();
  /// A constant for an scv of 0.
  [[nodiscard]] double gamma(double mean, double scv);
  [[nodiscard]] double log_normal(double mean, double scv);

 private:
  std::mt19937_64 state_;
};

}  // namespace sluice::simulator
