#include "scheduler/distribution.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "scheduler/detail/gamma.hpp"

namespace sluice::scheduler {

namespace {
constexpr double smallest_scv = 1e-4;
}

distribution::distribution() : mgf_limit_(forever.count()) {}

distribution distribution::gamma(seconds mean, double scv) {
  return mixture({{.weight = 1.0, .mean = mean, .scv = scv}});
}

distribution distribution::mixture(std::vector<part> const& parts) {
  double total = 0.0;
  for (auto const& p : parts) {
    if (!(p.weight > 0.0) || !std::isfinite(p.weight) || !(p.mean.count() >= 0.0) ||
        !std::isfinite(p.mean.count()) || !(p.scv >= 0.0) || !std::isfinite(p.scv)) {
      throw std::invalid_argument(
          "a distribution needs weights > 0, means >= 0 and scv >= 0, all finite; got weight " +
          std::to_string(p.weight) + ", mean " + std::to_string(p.mean.count()) + " s, scv " +
          std::to_string(p.scv));
    }
    total += p.weight;
  }
  if (parts.empty()) {
    throw std::invalid_argument("a distribution needs at least one part");
  }
  distribution result;
  for (auto const& p : parts) {
    double const weight = p.weight / total;
    double const mean = p.mean.count();
    bool const constant = p.scv < smallest_scv || mean == 0.0;
    result.mean_ += weight * mean;
    result.second_moment_ += weight * mean * mean * (constant ? 1.0 : 1.0 + p.scv);
    if (constant) {
      result.atoms_.push_back({.value = mean,
                               .weight = weight,
                               .weight_above = 0.0,
                               .first_moment_above = 0.0,
                               .second_moment_above = 0.0});
    } else {
      result.gammas_.push_back(
          {.weight = weight, .mean = mean, .shape = 1.0 / p.scv, .scale = mean * p.scv});
      result.mgf_limit_ = std::min(result.mgf_limit_, 1.0 / (mean * p.scv));
    }
  }
  std::sort(result.atoms_.begin(), result.atoms_.end(),
            [](atom const& a, atom const& b) { return a.value < b.value; });
  double weight = 0.0;
  double first = 0.0;
  double second = 0.0;
  std::for_each(result.atoms_.rbegin(), result.atoms_.rend(), [&](atom& a) {
    a.weight_above = weight += a.weight;
    a.first_moment_above = first += a.weight * a.value;
    a.second_moment_above = second += a.weight * a.value * a.value;
  });
  return result;
}

distribution distribution::mixture_of(std::vector<weighted> const& those) {
  std::vector<part> parts;
  for (auto const& each : those) {
    for (auto const& a : each.of->atoms_) {
      parts.push_back({each.weight * a.weight, seconds{a.value}, 0.0});
    }
    for (auto const& g : each.of->gammas_) {
      parts.push_back({each.weight * g.weight, seconds{g.mean}, 1.0 / g.shape});
    }
    if (each.of->atoms_.empty() && each.of->gammas_.empty()) {
      parts.push_back({each.weight, seconds{0.0}, 0.0});  // the constant zero has no parts
    }
  }
  return mixture(parts);
}

distribution distribution::of_samples(std::span<double const> samples) {
  std::vector<part> parts;
  parts.reserve(samples.size());
  for (double const x : samples) {
    parts.push_back({.weight = 1.0, .mean = seconds{x}, .scv = 0.0});
  }
  return mixture(parts);
}

namespace {

/// Those that lie beside each other, as one.
struct gathered {
  double weight = 0.0, first = 0.0, second = 0.0;

  void add(double its_weight, double mean, double second_moment) {
    weight += its_weight;
    first += its_weight * mean;
    second += its_weight * second_moment;
  }
  [[nodiscard]] double mean() const { return first / weight; }
  [[nodiscard]] double variance() const { return std::max(0.0, second / weight - mean() * mean()); }
  /// Two constants: on either side of the mean, or 0 and one above.
  void put_constants(std::vector<distribution::part>& to) const {
    double const deviation = std::sqrt(variance());
    if (deviation <= 1e-9 * mean()) {
      to.push_back({.weight = weight, .mean = seconds{mean()}});
    } else if (deviation < mean()) {
      to.push_back({.weight = 0.5 * weight, .mean = seconds{mean() - deviation}});
      to.push_back({.weight = 0.5 * weight, .mean = seconds{mean() + deviation}});
    } else {
      double const high = second / first;
      to.push_back({.weight = weight * (1.0 - mean() / high)});
      to.push_back({.weight = weight * mean() / high, .mean = seconds{high}});
    }
  }
  void put_gamma(std::vector<distribution::part>& to) const {
    to.push_back(
        {.weight = weight, .mean = seconds{mean()}, .scv = variance() / (mean() * mean())});
  }
};

}  // namespace

distribution distribution::condensed(std::size_t most) const {
  // A gamma part costs a hundred times what a constant does to whoever asks for tails.
  std::size_t const most_gammas = std::max<std::size_t>(1, most / 256);
  if (atoms_.size() <= most && gammas_.size() <= most_gammas) {
    return *this;
  }
  std::vector<part> parts;
  auto const gather = [](auto const& sorted, std::size_t groups, auto const& add, auto const& put) {
    double all = 0.0;
    for (auto const& each : sorted) {
      all += each.weight;
    }
    gathered group;
    for (auto const& each : sorted) {
      add(group, each);
      if (group.weight >= all / static_cast<double>(groups)) {
        put(group);
        group = {};
      }
    }
    if (group.weight > 0.0) {
      put(group);
    }
  };
  gather(
      atoms_, std::max<std::size_t>(1, most / 2),
      [](gathered& to, atom const& a) { to.add(a.weight, a.value, a.value * a.value); },
      [&](gathered const& group) { group.put_constants(parts); });
  auto gammas = gammas_;
  std::sort(gammas.begin(), gammas.end(),
            [](gamma_part const& a, gamma_part const& b) { return a.mean < b.mean; });
  gather(
      gammas, most_gammas,
      [](gathered& to, gamma_part const& g) {
        to.add(g.weight, g.mean, g.mean * g.mean * (1.0 + 1.0 / g.shape));
      },
      [&](gathered const& group) { group.put_gamma(parts); });
  return mixture(parts);
}

distribution distribution::of_constants(std::size_t slices) const {
  if (gammas_.empty()) {
    return *this;
  }
  std::vector<part> parts;
  parts.reserve(std::max(gammas_.size(), 2 * slices + atoms_.size()));
  double all = 0.0;
  for (auto const& g : gammas_) {
    parts.push_back({g.weight, seconds{g.mean}, 1.0 / g.shape});
    all += g.weight;
  }
  auto const curved = mixture(parts);  // the gammas alone
  parts.clear();
  // Of what is more than x: its weight, and its moments.
  auto const beyond = [&curved, all](double x) {
    auto const over = curved.of_gammas(x);
    return gathered{.weight = all * over.probability,
                    .first = all * (over.mean + x * over.probability),
                    .second = all * (over.square + 2.0 * x * over.mean + x * x * over.probability)};
  };
  auto upper = beyond(0.0);
  for (std::size_t i = 1; i <= slices; ++i) {
    double const share = static_cast<double>(i) / static_cast<double>(slices);
    auto const next = i < slices ? beyond(curved.quantile(share).count()) : gathered{};
    gathered const slice{.weight = upper.weight - next.weight,
                         .first = upper.first - next.first,
                         .second = upper.second - next.second};
    if (slice.weight > 0.0 && slice.first > 0.0) {
      slice.put_constants(parts);
    }
    upper = next;
  }
  for (auto const& a : atoms_) {
    parts.push_back({a.weight, seconds{a.value}, 0.0});
  }
  return mixture(parts);
}

distribution distribution::scaled(double factor) const {
  std::vector<part> parts;
  parts.reserve(atoms_.size() + gammas_.size());
  for (auto const& a : atoms_) {
    parts.push_back({a.weight, seconds{factor * a.value}, 0.0});
  }
  for (auto const& g : gammas_) {
    parts.push_back({g.weight, seconds{factor * g.mean}, 1.0 / g.shape});
  }
  return parts.empty() ? distribution{} : mixture(parts);
}

seconds distribution::quantile(double share) const noexcept {
  double high = mean_;
  while (cdf(seconds{high}) < share && std::isfinite(high)) {
    high = 2.0 * high + smallest_scv;
  }
  double low = 0.0;
  constexpr double precision = 1e-3;
  while (high - low > precision * high) {
    double const middle = 0.5 * (low + high);
    (cdf(seconds{middle}) < share ? low : high) = middle;
  }
  return seconds{high};
}

double distribution::scv() const noexcept {
  return mean_ > 0.0 ? std::max(0.0, second_moment_ / (mean_ * mean_) - 1.0) : 0.0;
}

void distribution::add_atoms(excess& to, double x,
                             std::vector<atom>::const_iterator above) const noexcept {
  if (above != atoms_.end()) {
    double const s0 = above->weight_above;
    double const s1 = above->first_moment_above;
    to.probability += s0;
    to.mean += std::max(0.0, s1 - x * s0);
    to.square += std::max(0.0, above->second_moment_above - x * (2.0 * s1 - x * s0));
  }
}

distribution::excess distribution::excess_over(double x) const noexcept {
  auto sum = of_gammas(x);
  add_atoms(sum, x, std::upper_bound(atoms_.begin(), atoms_.end(), x, [](double v, atom const& a) {
              return v < a.value;
            }));
  return sum;
}

std::vector<distribution::excess> distribution::excesses(seconds step, std::size_t count) const {
  std::vector<excess> result;
  result.reserve(count);
  auto above = atoms_.begin();
  for (std::size_t i = 0; i < count; ++i) {
    double const x = static_cast<double>(i) * step.count();
    while (above != atoms_.end() && above->value <= x) {
      ++above;
    }
    result.push_back(of_gammas(x));
    add_atoms(result.back(), x, above);
  }
  return result;
}

distribution::excess distribution::of_gammas(double x) const noexcept {
  excess sum;
  for (auto const& g : gammas_) {
    double const z = x / g.scale;
    auto const [q0, step] = detail::gamma_tail_at(g.shape, z);
    double const q1 = q0 + step;
    double const q2 = q1 + step * z / (g.shape + 1.0);
    double const second = g.mean * g.mean * (1.0 + 1.0 / g.shape);
    sum.probability += g.weight * q0;
    sum.mean += g.weight * std::max(0.0, g.mean * q1 - x * q0);
    sum.square += g.weight * std::max(0.0, second * q2 - 2.0 * x * g.mean * q1 + x * x * q0);
  }
  return sum;
}

double distribution::cdf(seconds x) const noexcept {
  return x.count() < 0.0 ? 0.0 : std::clamp(1.0 - excess_over(x.count()).probability, 0.0, 1.0);
}

seconds distribution::mean_excess(seconds x) const noexcept {
  return seconds{excess_over(x.count()).mean};
}

double distribution::mgf(double theta_per_s) const noexcept {
  if (theta_per_s >= mgf_limit_) {
    return forever.count();
  }
  double sum = gammas_.empty() && atoms_.empty() ? 1.0 : 0.0;
  for (auto const& a : atoms_) {
    sum += a.weight * std::exp(theta_per_s * a.value);
  }
  for (auto const& g : gammas_) {
    sum += g.weight * std::exp(-g.shape * std::log1p(-theta_per_s * g.scale));
  }
  return sum;
}

double distribution::mgf_slope(double theta_per_s) const noexcept {
  if (theta_per_s >= mgf_limit_) {
    return forever.count();
  }
  double sum = 0.0;
  for (auto const& a : atoms_) {
    sum += a.weight * a.value * std::exp(theta_per_s * a.value);
  }
  for (auto const& g : gammas_) {
    sum += g.weight * g.mean * std::exp(-(g.shape + 1.0) * std::log1p(-theta_per_s * g.scale));
  }
  return sum;
}

}  // namespace sluice::scheduler
