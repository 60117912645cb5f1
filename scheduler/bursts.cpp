#include "scheduler/bursts.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "scheduler/detail/matrix2.hpp"

namespace sluice::scheduler {
namespace {

using detail::matrix2;

void check_number(char const* what, double value, bool may_be_zero) {
  if (!std::isfinite(value) || value < 0.0 || (!may_be_zero && value == 0.0)) {
    throw std::invalid_argument(std::string(what) + " must be a finite number " +
                                (may_be_zero ? ">= 0" : "> 0") + "; got " + std::to_string(value));
  }
}

/// The matrix whose powers the number in the system follows from level to level: R = Λ (−(A + R M))⁻¹, by iteration from
/// zero, which rises to it.
matrix2 levels_ratio(matrix2 const& arrive, matrix2 const& stay, double leave) {
  matrix2 ratio;
  for (int i = 0; i < 1'000'000; ++i) {
    matrix2 const next = arrive * ((stay + ratio * leave) * -1.0).inverse();
    double const change = std::max({std::abs(next.a - ratio.a), std::abs(next.b - ratio.b),
                                    std::abs(next.c - ratio.c), std::abs(next.d - ratio.d)});
    ratio = next;
    if (change < 1e-15) {
      break;
    }
  }
  return ratio;
}

}  // namespace

seconds mean_wait_by_spread(queue_load const& demand, double gap_scv) {
  check_number("the squared coefficient of variation of gaps", gap_scv, true);
  seconds const poisson = mean_warm_wait(demand);
  double const rho = demand.utilisation();
  double const service_scv = demand.service.scv();
  double const spread = gap_scv + service_scv;
  if (poisson == forever || spread == 0.0) {
    return rho >= 1.0 ? forever : seconds{0.0};
  }
  double correction = 1.0;
  if (gap_scv < 1.0) {
    double const more_even = 1.0 - gap_scv;
    correction = std::exp(-2.0 * (1.0 - rho) * more_even * more_even / (3.0 * rho * spread));
  }
  return poisson * (spread / (1.0 + service_scv)) * correction;
}

double switching_poisson::mean_rate_per_s() const noexcept {
  double const both = switches_per_s[0] + switches_per_s[1];
  // The share of time in one state is the other's rate of leaving.
  return (rates_per_s[0] * switches_per_s[1] + rates_per_s[1] * switches_per_s[0]) / both;
}

seconds mean_wait(switching_poisson const& stream, seconds mean_service) {
  for (std::size_t i = 0; i < 2; ++i) {
    check_number("rates_per_s", stream.rates_per_s[i], true);
    check_number("switches_per_s", stream.switches_per_s[i], false);
  }
  check_number("the mean service time", mean_service.count(), false);
  double const leave = 1.0 / mean_service.count();
  double const rate = stream.mean_rate_per_s();
  if (rate >= leave) {
    return forever;
  }
  if (rate == 0.0) {
    return seconds{0.0};
  }
  auto const [up0, up1] = stream.rates_per_s;
  auto const [out0, out1] = stream.switches_per_s;
  matrix2 const arrive{up0, 0.0, 0.0, up1};
  matrix2 const empty{-out0 - up0, out0, out1, -out1 - up1};
  matrix2 const busy = empty + matrix2{-leave, 0.0, 0.0, -leave};
  matrix2 const ratio = levels_ratio(arrive, busy, leave);

  // The row vector of an empty system is in the null space of `empty + R M`, and has a sum of 1 − ρ.
  matrix2 const balance = empty + ratio * leave;
  double const idle = 1.0 - rate / leave;
  double const share = balance.c / (balance.c - balance.a);
  matrix2 const above = matrix2{1.0 - ratio.a, -ratio.b, -ratio.c, 1.0 - ratio.d}.inverse();
  auto const weighted = (ratio * above * above).applied_to({idle * share, idle * (1.0 - share)});
  return seconds{(weighted[0] + weighted[1]) / rate} - mean_service;
}

}  // namespace sluice::scheduler
