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
  /// memory is short. `first_notice`: after so long a process that waits says for what; then after
  /// twice as long, and so on.
  planner(runtime_library const* runtime, bool adapt,
          std::chrono::duration<double> first_notice = std::chrono::seconds{30})
      : runtime_{runtime}, adapt_{adapt}, first_notice_{first_notice} {}

  /// Samples of the next slice; waits for memory if not even the smallest permitted one fits.
  /// Throws out_of_memory_error if that can never fit.
  [[nodiscard]] std::int64_t next(std::int64_t remaining, std::int64_t largest);
  [[nodiscard]] std::chrono::duration<double> waited() const { return waited_; }

 private:
  void start(std::int64_t largest);
  void wait(std::uint64_t bytes, std::int64_t samples);
  void report(std::uint64_t bytes, std::int64_t samples) const;

  runtime_library const* runtime_;
  bool adapt_;
  std::chrono::duration<double> first_notice_;
  std::uint64_t started_ = 0;  ///< which of the process's plans is ours; 0: none
  std::int64_t largest_ = 0;   ///< for how many samples it was started
  std::chrono::duration<double> waited_{};
};

}  // namespace sluice::detail
