#pragma once

#include <cstdint>
#include <ctime>

namespace sluice::nccl_shim {

/// CLOCK_MONOTONIC, in nanoseconds.
[[nodiscard]] inline std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace sluice::nccl_shim
