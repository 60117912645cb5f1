/// The incomplete gamma function, which the standard library does not have.
#pragma once

namespace sluice::scheduler::detail {

/// Q(shape, x) = Γ(shape, x)/Γ(shape): the probability that a gamma variable of that shape and unit
/// scale exceeds x. Also P(a Poisson variable of mean x is ≤ shape − 1) for integer shapes, and its
/// smooth interpolation for others. Needs shape > 0; 1 for x ≤ 0. Relative error below 1e-12 for
/// shapes up to 1e5. Source: NIST Digital Library of Mathematical Functions, 8.7.1 (series)
/// and 8.9.2 (continued fraction).
[[nodiscard]] double gamma_survival(double shape, double x) noexcept;

/// x^shape e^{−x} / Γ(shape + 1), the step of the recurrence Q(shape + 1, x) = Q(shape, x) + this
/// (DLMF 8.8.6).
[[nodiscard]] double gamma_step(double shape, double x) noexcept;

/// Both at once, for little more than one of them.
struct gamma_tail {
  double survival;
  double step;
};
[[nodiscard]] gamma_tail gamma_tail_at(double shape, double x) noexcept;

}  // namespace sluice::scheduler::detail
