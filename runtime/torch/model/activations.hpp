/// What models' computations need of memory while they run comes out of the pool. This header knows no torch.
///
///   auto const activations = serve_activations(pool, device);
///   // … models are prepared, and compute …
///   activations->give_back();
///
/// On a GPU that is all that torch and the libraries allocate, by the segments of torch's caching allocator. On the host
/// it is tensors of at least 64 KiB that the thread makes that runs the model; smaller ones, and what libraries
/// allocate by themselves, come from the process's heap.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/torch/model/torch_model.hpp"

namespace sluice::memhandover {
class serving_pool;
}

namespace sluice::server {

class activations {
 public:
  activations() = default;
  activations(activations const&) = delete;
  activations& operator=(activations const&) = delete;
  virtual ~activations() = default;

  /// What is kept for the next computation goes back to the pool. On a GPU it waits for the device.
  virtual void give_back() = 0;
};

/// Once in a process, after `start_torch` and before its first model, and for as long as it lives.
[[nodiscard]] std::shared_ptr<activations> serve_activations(
    std::shared_ptr<memhandover::serving_pool> pool, torch_device device);

/// Of a GPU: gives what torch keeps back to the driver, before the pool answers.
void empty_cache(torch_device device);

}  // namespace sluice::server
