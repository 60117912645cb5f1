/// How many samples the next micro-batch has, and waiting for the memory that it needs.
#pragma once

#include <chrono>
#include <cstdint>

#include "runtime/torch/step/detail/runtime_library.hpp"

namespace sluice::detail {

/// Sizes of micro-batches: equal ones in plain libtorch, what fits in the pool.
class planner {
 public:
  /// `runtime`: null for plain libtorch. `adapt`: whether a micro-batch may become smaller when
  /// memory is short.
  planner(runtime_library const* runtime, bool adapt) : runtime_{runtime}, adapt_{adapt} {}

  /// Samples of the next slice; waits for memory if not even the smallest permitted one fits.
  /// Throws out_of_memory_error if that can never fit.
  [[nodiscard]] std::int64_t next(std::int64_t remaining, std::int64_t largest);
  [[nodiscard]] std::chrono::duration<double> waited() const { return waited_; }

 private:
  void start(std::int64_t largest);
  void wait(std::uint64_t bytes, std::int64_t samples);

  runtime_library const* runtime_;
  bool adapt_;
  std::uint64_t started_ = 0;  ///< which of the process's plans is ours; 0: none
  std::int64_t largest_ = 0;   ///< for how many samples it was started
  std::chrono::duration<double> waited_{};
};

}  // namespace sluice::detail
