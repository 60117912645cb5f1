/// The distribution of a non-negative duration (service time, load time), in the forms that the queueing
/// formulas ask for.
///
/// A distribution is a mixture of gamma distributions, each given by its mean and its squared coefficient of
/// variation ("scv": 0 is a constant, 1 an exponential). That covers a measured sample (constants
/// of equal weight), what is known before any measurement (one gamma), and the textbook cases, and
/// every transform below has a closed form.
///
///   auto service = distribution::gamma(100ms, 1.0);     // exponential
///   auto measured = distribution::of_samples(window);   // seconds
///   auto two_kinds =
///       distribution::mixture({{.weight = 0.9, .mean = 20ms}, {.weight = 0.1, .mean = 200ms}});
///
/// Immutable after construction: any number of threads may read one. Constructors throw
/// `std::invalid_argument`. Sources: stop-loss moments of a gamma distribution by x·g_k(x) =
/// E[X]·g_{k+1}(x), g_k the density of shape k.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

class distribution {
 public:
  struct part {
    double weight = 1.0;  ///< any positive number; weights are normalised
    seconds mean{0.0};
    double scv = 0.0;
  };

  /// The constant zero.
  distribution();
  /// One gamma distribution. An scv below 1e-4 counts as a constant.
  [[nodiscard]] static distribution gamma(seconds mean, double scv);
  [[nodiscard]] static distribution mixture(std::vector<part> const& parts);
  struct weighted {
    double weight = 1.0;  ///< any positive number; weights are normalised
    distribution const* of = nullptr;
  };
  /// One of `those`, each with the probability of its weight.
  [[nodiscard]] static distribution mixture_of(std::vector<weighted> const& those);
  /// The empirical distribution of `samples` (seconds), each with the same weight.
  [[nodiscard]] static distribution of_samples(std::span<double const> samples);

  /// Of `factor` times as much; the factor is more than 0.
  [[nodiscard]] distribution scaled(double factor) const;
  /// Of about `most` constants, and of one gamma distribution for 256 of that: neighbours by value become fewer, with the same mean
  /// and second moment.
  [[nodiscard]] distribution condensed(std::size_t most) const;
  /// The same with gamma distributions cut into so many slices of the same weight, each two constants with its mean and second moment:
  /// for whoever asks for tails often.
  [[nodiscard]] distribution of_constants(std::size_t slices) const;
  /// The smallest x with P(X ≤ x) ≥ share, to a thousandth; share in [0, 1).
  [[nodiscard]] seconds quantile(double share) const noexcept;

  [[nodiscard]] seconds mean() const noexcept { return seconds{mean_}; }
  [[nodiscard]] double second_moment_s2() const noexcept { return second_moment_; }
  /// Squared coefficient of variation; 0 for the constant zero.
  [[nodiscard]] double scv() const noexcept;

  /// P(X ≤ x).
  [[nodiscard]] double cdf(seconds x) const noexcept;
  /// E[(X − x)+], x ≥ 0.
  [[nodiscard]] seconds mean_excess(seconds x) const noexcept;

  /// P(X > x), E[(X − x)+] in seconds and E[((X − x)+)²] in seconds².
  struct excess {
    double probability = 0.0;
    double mean = 0.0;
    double square = 0.0;
  };
  /// At 0, step, 2 · step, …: in one go over all samples, which `count` single questions would search each.
  [[nodiscard]] std::vector<excess> excesses(seconds step, std::size_t count) const;

  /// E[e^{θX}]; +inf at and beyond `mgf_limit`.
  [[nodiscard]] double mgf(double theta_per_s) const noexcept;
  /// E[X e^{θX}] in seconds; +inf at and beyond `mgf_limit`.
  [[nodiscard]] double mgf_slope(double theta_per_s) const noexcept;
  /// The smallest θ (1/s) at which the moment generating function is infinite; +inf for bounded
  /// distributions.
  [[nodiscard]] double mgf_limit_per_s() const noexcept { return mgf_limit_; }

 private:
  struct gamma_part {
    double weight;
    double mean;
    double shape;
    double scale;
  };
  /// A constant, with sums over itself and all larger ones, so that an excess costs one search.
  struct atom {
    double value;
    double weight;
    double weight_above;
    double first_moment_above;
    double second_moment_above;
  };
  [[nodiscard]] excess excess_over(double x) const noexcept;
  [[nodiscard]] excess of_gammas(double x) const noexcept;
  /// `above`: the first atom beyond x.
  void add_atoms(excess& to, double x, std::vector<atom>::const_iterator above) const noexcept;

  std::vector<gamma_part> gammas_;
  std::vector<atom> atoms_;  // by value
  double mean_ = 0.0;
  double second_moment_ = 0.0;
  double mgf_limit_;
};

}  // namespace sluice::scheduler
