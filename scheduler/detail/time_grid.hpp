/// Distributions of times up to a limit, as masses on a grid of 128 steps, which keeps their means.
///
/// Mass between two grid points is split between them in proportion to nearness; what lies beyond the limit is lost. Source of the
/// split: Gerber, Insurance: Mathematics and Economics 1 (1982). Pure functions.
#pragma once

#include <cstddef>
#include <vector>

#include "scheduler/distribution.hpp"

namespace sluice::scheduler::detail {

inline constexpr std::size_t grid_steps = 128;

/// On 0, h, …, grid_steps · h.
using grid_masses = std::vector<double>;
using grid_excesses = std::vector<distribution::excess>;

/// What the functions below need to know of a distribution; `h` in seconds.
[[nodiscard]] grid_excesses excesses_on_grid(distribution const& of, double h);

[[nodiscard]] grid_masses on_grid(grid_excesses const& of, double h);

/// Of what is left of a time that is in progress, at a random instant of it. All of it at 0 if `mean` is 0.
[[nodiscard]] grid_masses residual_on_grid(grid_excesses const& of, double mean, double h);

/// Of the sum of two independent ones.
[[nodiscard]] grid_masses sum_of(grid_masses const& a, grid_masses const& b);

/// Σ a[i] b[i], at most 1.
[[nodiscard]] double share_of(grid_masses const& a, grid_masses const& b);

/// Of the wait at a server that is never released, M/G/1: a geometric number (ratio ρ) of residual services, w = (1 − ρ) Σ ρⁿ r*ⁿ, by
/// Panjer's recursion (ASTIN Bulletin 12, 1981). `residuals` is ρr, the sum of λb₁r over the classes of its requests; ρ < 1.
[[nodiscard]] grid_masses waits_on_grid(grid_masses const& residuals, double utilisation);

}  // namespace sluice::scheduler::detail
