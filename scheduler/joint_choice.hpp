/// Chooses how each of several models is kept where the memory that they would have together is more than there is.
///
/// A model has options (an idle timeout, and what of its weights stays when it goes), each with the memory that it has on average and
/// what it loses. Where memory is enough each has the option that loses least, and of those the one with least memory. Where it is not,
/// options with less memory are taken, in the order of what a byte costs: the lower convex hull of each model's options, step by step, the
/// cheapest of all models' steps first. What the last step leaves over is then used for whatever it saves most.
///
///   std::vector<std::vector<kept_option>> const models{{{.held_bytes = 10e9, .loss_per_s = 0.0},
///                                                       {.held_bytes = 1e9, .loss_per_s = 0.2}},
///                                                      {{.held_bytes = 6e9, .loss_per_s = 0.0},
///                                                       {.held_bytes = 1e9, .loss_per_s = 0.4}}};
///   auto const made = choose_together(models, 8e9);
///   made.options;   // {1, 0}: the first gives more bytes, and loses less
///
/// Steps on hulls are the optimum of the relaxed problem, in which a model may be kept as a mixture of two options; what is chosen loses at
/// most one step more than that. Source: Sinha and Zoltners, *Operations Research* 27 (1979), for the multiple-choice knapsack. Pure
/// functions.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "scheduler/warm_policy.hpp"

namespace sluice::scheduler {

struct kept_option {
  double held_bytes = 0.0;  ///< on average, of all its time
  double loss_per_s = 0.0;  ///< what is late, in what the promise permits
};

/// Of each candidate of `made`, in their order: the weights where they are not released, and the requests that are late beyond what the
/// objective permits, over that.
[[nodiscard]] std::vector<kept_option> kept_options_of(warm_decision const& made,
                                                       double weight_bytes);

struct joint_choice {
  std::vector<std::size_t> options;  ///< of each model
  double held_bytes = 0.0;
  double loss_per_s = 0.0;
  double price = 0.0;  ///< loss per second and byte, of the last step; 0 where memory is enough
  bool fits = true;    ///< false: not even what has least memory of each model does
};

/// `memory_bytes`: what all have together at most. `current`: what is in force, of each model, or nothing; it stays as long as it fits and
/// loses at most a tenth more. Throws `std::invalid_argument` for a model without options, and for numbers that are
/// negative or not finite.
[[nodiscard]] joint_choice choose_together(std::span<std::vector<kept_option> const> models,
                                           double memory_bytes,
                                           std::span<std::size_t const> current = {});

}  // namespace sluice::scheduler
