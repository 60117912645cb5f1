/// A training process without torch: the memory of a job, with the device that it lies on and the
/// gate that its work passes.
///
///   pool_training job{backend_kind::cuda, 0, {.broker = broker, .name = "job"}};
///   auto* const block = job.memory().allocate_arena(bytes);
///   job.pass([&] { (void)job.device().fill(block, bytes, 1); });
///
/// Thread-safety: that of `training_memory`, `draining_gate` and `pool_device`.
#pragma once

#include <memory>
#include <utility>

#include "benchmarks/pool_device.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::bench {

class pool_training {
 public:
  /// Joins the pool that `how` names; what follows from the backend is set here. Throws as
  /// `training_memory` and `open_pool_device` do.
  pool_training(memhandover::backend_kind backend, int ordinal, step::training_memory::options how);

  [[nodiscard]] pool_device& device() noexcept { return *device_; }
  [[nodiscard]] step::training_memory& memory() noexcept { return *memory_; }
  [[nodiscard]] bool on_gpu() const noexcept { return gate_ != nullptr; }

  /// Does `work` while no demand empties the device; on the host at any time. False: the micro-batch
  /// has been aborted, and nothing was done.
  template <typename Work>
  bool pass(Work&& work) {
    if (gate_ != nullptr) {
      return gate_->pass(std::forward<Work>(work));
    }
    work();
    return true;
  }

 private:
  std::unique_ptr<pool_device> device_;
  std::unique_ptr<draining_gate> gate_;  ///< null on the host
  std::unique_ptr<step::training_memory> memory_;
};

}  // namespace sluice::bench
