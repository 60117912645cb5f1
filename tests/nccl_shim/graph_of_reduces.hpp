/// All-reduces of a job's rank by launches of a CUDA graph that has recorded them, with something else.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>

#include "abi/gate_api.h"

namespace sluice::nccl_shim::testing {

/// What it needs of the job: the driver's functions by name, and the first and second call of NCCL's. The first adds up numbers.
struct graph_of_reduces_needs {
  sluice_gate_api const* gate;
  std::function<void*(char const*)> driver;
  std::function<int(int which, int& from, int& to)> record;
  CUstream where;
  int of_one;  ///< what the second makes of a one
};

/// One graph with two calls, instantiated from a clone of what was captured. It is launched again and
/// again, between kernels that bring its number and take the sum. One thread's.
class graph_of_reduces {
 public:
  explicit graph_of_reduces(graph_of_reduces_needs needs);
  /// As NCCL's call would: 0, or the driver's error.
  [[nodiscard]] int reduce(int& from, int& to);
  /// How often the second has made something else.
  [[nodiscard]] static int wrong();

 private:
  graph_of_reduces_needs needs_;
  CUgraphExec executable_ = nullptr;
  CUfunction copy_ = nullptr;
  int from_ = 0;  // the rest is the device's
  int to_ = 0;
  int one_ = 1;
  int became_ = 0;
};

}  // namespace sluice::nccl_shim::testing
