/// A rank that sends to and receives from the others, in every way that the ranks of a job do it: in groups and
/// alone, over one communicator and two, with collectives among them, in an order that would not do if each call
/// waited for its other end.
#pragma once

#include <cuda.h>

#include <functional>

struct ncclComm;

namespace sluice::nccl_shim::testing {

struct exchanging {
  int rank;
  int ranks;
  ncclComm* all;    ///< of all ranks
  ncclComm* other;  ///< likewise
  CUstream where;
  CUstream beside;
  std::function<void()> synchronise;  ///< both streams
};

/// So many rounds, alike on all ranks. Prints what has come that should not have.
void exchange(exchanging const& job, int rounds);

}  // namespace sluice::nccl_shim::testing
