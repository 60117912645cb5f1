/// Communicators of two of a job's ranks each: of four ranks, those of two shards and their replicas; of three, those of
/// neighbours.
#pragma once

#include <cuda.h>

#include <string>
#include <vector>

#include "tests/nccl_shim/micro_batches.hpp"

struct ncclComm;

namespace sluice::nccl_shim::testing {

struct parts {
  std::vector<adders> with;  ///< in the order in which all call them
  std::vector<ncclComm*> communicators;
};

/// Makes those that the rank is one of; `file` is where the job's ranks meet.
[[nodiscard]] parts parts_of_job(int rank, int ranks, std::string const& file, CUstream where);

}  // namespace sluice::nccl_shim::testing
