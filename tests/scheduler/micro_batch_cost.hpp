/// What micro-batches of a job need, for tests of who plans them.
#pragma once

#include <cstdint>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// 1 000 + 100 n bytes and 10 ms + n · 1 ms for a micro-batch of n.
struct micro_batch_cost {
  std::uint64_t base_bytes = 1000;
  std::uint64_t bytes_per_sample = 100;
  double base_s = 0.010;
  double s_per_sample = 0.001;

  [[nodiscard]] std::uint64_t bytes(std::uint64_t n) const {
    return base_bytes + bytes_per_sample * n;
  }
  [[nodiscard]] seconds time(std::uint64_t n) const {
    return seconds{base_s + s_per_sample * static_cast<double>(n)};
  }
};

}  // namespace sluice::scheduler
