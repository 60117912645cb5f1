/// A CUDA driver whose work is done when the test says, and some of whose calls fail.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {

struct slow_driver {
  std::deque<std::function<void()>> work;  ///< submitted and not done
  std::uint64_t done = 0;                  ///< pieces of work

  std::uint64_t calls = 0;
  std::uint64_t fails_at = ~std::uint64_t{0};  ///< a call, counted from 0
  std::uint64_t failures = 1;                  ///< of that call and those after it
  CUresult failure = CUDA_ERROR_NOT_PERMITTED;

  int streams = 0;
  int events = 0;
  int modules = 0;
  int allocations = 0;
  int unrelaxed = 0;  ///< calls that would have broken a capture

  /// Does the oldest pieces of work.
  void run(std::size_t pieces);
};

/// The state behind all drivers of `make_slow_driver`, which begins anew with each.
extern slow_driver slow;

/// Has all that copies and hashes need; its device memory is the host's.
std::shared_ptr<cuda_driver> make_slow_driver();

}  // namespace sluice::memhandover
