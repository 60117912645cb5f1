/// Mean waits where arrivals are no Poisson process: by the spread of the gaps alone, and exactly for
/// a stream that switches between two rates.
///
///   switching_poisson stream{.rates_per_s = {18.0, 2.0}, .switches_per_s = {0.1, 0.1}};
///   mean_wait(stream, 50ms);                                       // 0.29895 s
///   mean_wait_by_spread({.arrivals_per_s = 8.0, .service = b}, 4.0);   // gaps with an scv of 4
///
/// Services are of one server, first come first served, and nothing is loaded. Pure functions of any thread; they
/// throw `std::invalid_argument` for rates and spreads that are negative or no numbers.
///
/// Sources: Allen, Probability, Statistics and Queueing Theory, 1978 (Allen–Cunneen); Krämer and Langenbach-Belz, 8th
/// International Teletraffic Congress, 1976; Neuts, Matrix-Geometric Solutions in Stochastic Models, 1981.
#pragma once

#include <array>

#include "scheduler/queueing.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// The wait by the squared coefficients of variation of gaps and services, for gaps that do not depend on each other:
/// Allen and Cunneen's, corrected for gaps more even than Poisson's. Exact for Poisson gaps, of the right size for others; gaps that
/// do depend on each other may make it far too small. `forever` at utilisation ≥ 1.
[[nodiscard]] seconds mean_wait_by_spread(queue_load const& demand, double gap_scv);

/// Poisson arrivals whose rate is one of two, each for an exponential time: MMPP of two states.
struct switching_poisson {
  std::array<double, 2> rates_per_s{};
  std::array<double, 2> switches_per_s{};  ///< out of each state

  /// Over long times.
  [[nodiscard]] double mean_rate_per_s() const noexcept;
};

/// Exact for exponential services: the number in the system is a matrix-geometric distribution. `forever` at utilisation ≥ 1.
[[nodiscard]] seconds mean_wait(switching_poisson const& stream, seconds mean_service);

}  // namespace sluice::scheduler
