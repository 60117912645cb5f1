/// Chooses which models leave a device where memory is wanted: those whose absence costs least.
///
/// What the absence of a model costs is its rate of requests times what a cold start costs it (model_controller.hpp), so for each byte
/// that is freed the loss is least where greedy-dual caches have it: by frequency times cost over size. Sets are compared as a whole, since
/// a large model may free at once what several small ones do, each cheaper by its bytes: at most twice the least loss there is, and for few
/// models hardly ever more than that.
///
///   std::vector<resident_model> const there{{.bytes = 4_GiB, .loss_per_s = 0.2},
///                                           {.bytes = 2_GiB, .loss_per_s = 0.05}};
///   models_to_release(there, 1_GiB);   // the second alone
///
/// Source: Csirik, Frenk, Labbé, Zhang, *Acta Cybernetica* 10 (1991), for sets that cover a size; Cao and Irani, USITS 1997, for
/// greedy-dual. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// One that may go.
struct resident_model {
  std::uint64_t bytes = 0;
  double loss_per_s = 0.0;    ///< what its absence costs
  seconds idle{0.0};          ///< of those that cost alike, the longest idle goes
  bool has_requests = false;  ///< goes only where all without are not enough
};

/// Places in `models` of those that free `bytes` or more between them, and none that could stay; in the order of what their bytes
/// cost. Empty if all are not enough.
[[nodiscard]] std::vector<std::size_t> models_to_release(std::span<resident_model const> models,
                                                         std::uint64_t bytes);

}  // namespace sluice::scheduler
