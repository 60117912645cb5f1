/// What models that share a device do to each other's waits, for the prediction of each.
///
/// Where one computation runs at a time, in the order of arrival, the models are classes of one M/G/1 queue, and each one's
/// attainment follows in closed form. Where several run at once, of each model one, there is no such form: Poisson arrivals are
/// played to so many executors, with services drawn from the distributions that were measured, and of n at once each takes
/// slowdown[n − 1] times as long as alone. What a request takes beyond its service alone, by waiting and by being slowed down, is
/// then a distribution for each model.
///
///   std::vector<shared_model> const models{{.arrivals_per_s = 20.0, .service = small},
///                                          {.arrivals_per_s = 1.0, .service = large}};
///   auto const beside = predict_together(models, {.at_once = 1});
///   attainment_model{small, {}, 50ms, beside[0]}.at(20.0);
///
/// The simulation has one seed, so that the same inputs give the same answer. A model with fewer than 50 requests in it gets
/// the waits of all: its own queue is nearly always empty, so that this is too much rather than too little. Pure; throws
/// `std::invalid_argument` for what is negative or no number.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "scheduler/attainment.hpp"
#include "scheduler/distribution.hpp"

namespace sluice::scheduler {

struct shared_model {
  double arrivals_per_s = 0.0;
  distribution service{};     ///< as it was measured, beside the others
  double alone_factor = 1.0;  ///< the mean service alone as a share of that; in (0, 1]
};

struct shared_executors {
  std::size_t at_once = 1;
  std::vector<double> slowdown{};  ///< the last holds for more at once; empty: none
};

/// Of each model in the same order.
[[nodiscard]] std::vector<shared_load> predict_together(std::span<shared_model const> models,
                                                        shared_executors const& executors);

}  // namespace sluice::scheduler
