#include "scheduler/detail/gamma.hpp"

#include <cmath>
#include <limits>

namespace sluice::scheduler::detail {

namespace {

constexpr int max_terms = 100000;
constexpr double precision = 1e-15;

// Lower tail: step · Σ x^n / ((shape+1)…(shape+n)). Converges quickly for x < shape + 1.
double lower_by_series(double shape, double x, double step) noexcept {
  double term = 1.0;
  double sum = 1.0;
  for (int n = 1; n < max_terms && term > sum * precision; ++n) {
    term *= x / (shape + n);
    sum += term;
  }
  return step * sum;
}

// Upper tail: the even part of the continued fraction, evaluated front to back (Lentz), for x ≥
// shape + 1.
double upper_by_fraction(double shape, double x, double step) noexcept {
  constexpr double tiny = std::numeric_limits<double>::min() * 1e10;
  double denominator = x + 1.0 - shape;
  double numerators = 1.0 / tiny;
  double inverse = 1.0 / denominator;
  double value = inverse;
  for (int n = 1; n < max_terms; ++n) {
    double const a = -n * (n - shape);
    denominator += 2.0;
    inverse = a * inverse + denominator;
    inverse = 1.0 / (std::abs(inverse) < tiny ? tiny : inverse);
    numerators = denominator + a / numerators;
    numerators = std::abs(numerators) < tiny ? tiny : numerators;
    double const factor = inverse * numerators;
    value *= factor;
    if (std::abs(factor - 1.0) < precision) {
      break;
    }
  }
  return step * shape * value;
}

}  // namespace

double gamma_step(double shape, double x) noexcept {
  if (x <= 0.0) {
    return 0.0;
  }
  int sign = 1;  // std::lgamma would write it to a variable that all threads share
  return std::exp(shape * std::log(x) - x - ::lgamma_r(shape + 1.0, &sign));
}

gamma_tail gamma_tail_at(double shape, double x) noexcept {
  if (x <= 0.0) {
    return {1.0, 0.0};
  }
  // e^{−x} Σ x^n / n!: what shapes of priors are, and much the fastest.
  constexpr double largest_sum = 8.0;
  if (shape <= largest_sum && shape == std::floor(shape)) {
    double term = std::exp(-x);
    double sum = term;
    for (double n = 1.0; n < shape; n += 1.0) {
      term *= x / n;
      sum += term;
    }
    return {sum, term * (x / shape)};
  }
  double const step = gamma_step(shape, x);
  return {
      x < shape + 1.0 ? 1.0 - lower_by_series(shape, x, step) : upper_by_fraction(shape, x, step),
      step};
}

double gamma_survival(double shape, double x) noexcept {
  return gamma_tail_at(shape, x).survival;
}

}  // namespace sluice::scheduler::detail
