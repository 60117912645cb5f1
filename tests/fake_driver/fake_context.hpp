/// Devices, contexts and the calling thread's stack of contexts.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "tests/fake_driver/fake_core.hpp"

namespace sluice::fake {

class stream;

struct context {
  int device = 0;
  std::atomic<int> users{0};  ///< of a primary context: how often it is retained
  std::atomic<bool> alive{true};
  std::mutex lock;
  std::shared_ptr<stream> legacy;  ///< guarded by lock
};

/// The calling thread's current context, or nullptr.
[[nodiscard]] context* current_context();

[[nodiscard]] inline bool is_device(CUdevice device) {
  return device >= 0 && device < device_count();
}

}  // namespace sluice::fake
