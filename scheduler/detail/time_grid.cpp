#include "scheduler/detail/time_grid.hpp"

#include <algorithm>

namespace sluice::scheduler::detail {
namespace {

/// Of a distribution whose stop-loss function E[(X − x)+] at j·h is `stop_loss(j)`.
template <typename StopLoss>
grid_masses masses_of(double h, StopLoss const& stop_loss) {
  grid_masses result(grid_steps + 1);
  double before = 0.0;
  double here = stop_loss(0);
  for (std::size_t j = 0; j <= grid_steps; ++j) {
    double const after = stop_loss(j + 1);
    double const mass = j == 0 ? 1.0 - (here - after) / h : (before - 2.0 * here + after) / h;
    result[j] = std::max(0.0, mass);
    before = here;
    here = after;
  }
  return result;
}

}  // namespace

grid_excesses excesses_on_grid(distribution const& of, double h) {
  return of.excesses(seconds{h}, grid_steps + 2);
}

grid_masses on_grid(grid_excesses const& of, double h) {
  return masses_of(h, [&of](std::size_t j) { return of[j].mean; });
}

grid_masses residual_on_grid(grid_excesses const& of, double mean, double h) {
  if (mean <= 0.0) {
    grid_masses zero(grid_steps + 1);
    zero[0] = 1.0;
    return zero;
  }
  return masses_of(h, [&](std::size_t j) { return of[j].square / (2.0 * mean); });
}

grid_masses sum_of(grid_masses const& a, grid_masses const& b) {
  grid_masses result(grid_steps + 1);
  for (std::size_t i = 0; i <= grid_steps; ++i) {
    if (double const weight = a[i]; weight > 0.0) {
      double* const to = result.data() + i;
      double const* const from = b.data();
      for (std::size_t j = 0; j <= grid_steps - i; ++j) {
        to[j] += weight * from[j];
      }
    }
  }
  return result;
}

double share_of(grid_masses const& a, grid_masses const& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i <= grid_steps; ++i) {
    sum += a[i] * b[i];
  }
  return std::min(1.0, sum);
}

grid_masses waits_on_grid(grid_masses const& residuals, double utilisation) {
  grid_masses w(grid_steps + 1);
  double const scale = 1.0 / (1.0 - residuals[0]);
  w[0] = (1.0 - utilisation) * scale;
  for (std::size_t n = 0; n <= grid_steps; ++n) {
    if (n > 0) {
      w[n] *= scale;  // all that is less has been added
    }
    double* const to = w.data() + n;
    double const* const from = residuals.data();
    double const weight = w[n];
    for (std::size_t j = 1; j <= grid_steps - n; ++j) {
      to[j] += from[j] * weight;
    }
  }
  return w;
}

}  // namespace sluice::scheduler::detail
