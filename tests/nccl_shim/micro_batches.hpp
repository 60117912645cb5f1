/// Training whose micro-batches have collectives inside, and lose their memory at random instants: what
/// the runtime library does of it, without memory.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "abi/gate_api.h"

namespace sluice::nccl_shim::testing {

/// Ranks that add up numbers.
struct adders {
  int name;  ///< alike on all of them
  std::vector<int> ranks;
  /// An all-reduce of one number; returns NCCL's result.
  std::function<int(int& from, int& to)> reduce;
};

struct training {
  sluice_gate_api const* gate;
  int rank;
  std::chrono::nanoseconds patience;  ///< for a device to come to rest
  std::vector<adders> with;           ///< that this rank is one of
  int rounds;                         ///< of one all-reduce of each, in a micro-batch
  bool loses_memory;                  ///< at random instants
  std::function<void()> synchronise;
};

/// Trains so many micro-batches of so many rounds each, with one of each of the adders between them. Prints sums
/// that are wrong, then how many of them were kept, or the error that it ended with. If `secretly`, others are not
/// told of what runs again.
void train_together(training const& job, int micro_batches, bool secretly);

}  // namespace sluice::nccl_shim::testing
