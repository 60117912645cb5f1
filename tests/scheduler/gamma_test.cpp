#include "scheduler/detail/gamma.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace sluice::scheduler::detail {
namespace {

TEST(gamma_survival, is_the_exponential_tail_for_shape_one) {
  for (double const x : {0.001, 0.5, 1.0, 1.9, 2.1, 10.0, 50.0}) {
    EXPECT_NEAR(gamma_survival(1.0, x) / std::exp(-x), 1.0, 1e-12) << x;
  }
}

TEST(gamma_survival, is_the_error_function_for_shape_one_half) {
  for (double const x : {0.01, 0.3, 1.0, 4.0, 20.0}) {
    EXPECT_NEAR(gamma_survival(0.5, x) / std::erfc(std::sqrt(x)), 1.0, 1e-11) << x;
  }
}

TEST(gamma_survival, counts_poisson_events_for_whole_shapes) {
  double const mean = 7.3;
  double term = std::exp(-mean);
  double sum = term;
  for (int k = 0; k < 30; ++k) {
    EXPECT_NEAR(gamma_survival(k + 1.0, mean), sum, 1e-13) << k;
    term *= mean / (k + 1);
    sum += term;
  }
}

TEST(gamma_survival, follows_its_recurrence_across_both_methods) {
  for (double const shape : {0.2, 1.7, 30.0, 9999.0, 1e5}) {
    for (double const ratio : {0.5, 0.98, 1.0, 1.02, 1.6}) {
      double const x = shape * ratio + 0.1;
      double const direct = gamma_survival(shape + 1.0, x);
      EXPECT_NEAR(gamma_survival(shape, x) + gamma_step(shape, x), direct, 1e-10)
          << shape << ' ' << x;
    }
  }
}

TEST(gamma_survival, is_one_at_and_below_zero) {
  EXPECT_EQ(gamma_survival(2.5, 0.0), 1.0);
  EXPECT_EQ(gamma_survival(2.5, -1.0), 1.0);
  EXPECT_EQ(gamma_step(2.5, 0.0), 0.0);
}

TEST(gamma_tail, is_both_at_once) {
  for (double const shape : {0.2, 1.0, 1.7, 4.0, 8.0, 9.0, 30.0, 9999.0}) {
    EXPECT_EQ(gamma_tail_at(shape, 0.0).survival, 1.0);
    EXPECT_EQ(gamma_tail_at(shape, 0.0).step, 0.0);
    for (double const ratio : {0.01, 0.5, 1.0, 1.6, 20.0}) {
      auto const [survival, step] = gamma_tail_at(shape, ratio * shape);
      EXPECT_EQ(survival, gamma_survival(shape, ratio * shape)) << shape << ' ' << ratio;
      EXPECT_NEAR(step, gamma_step(shape, ratio * shape), 1e-12 * step) << shape << ' ' << ratio;
    }
  }
}

}  // namespace
}  // namespace sluice::scheduler::detail
