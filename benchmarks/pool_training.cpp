#include "benchmarks/pool_training.hpp"

namespace sluice::bench {

pool_training::pool_training(memhandover::backend_kind backend, int ordinal,
                             step::training_memory::options how)
    : device_(open_pool_device(backend, ordinal)) {
  if (backend == memhandover::backend_kind::cuda) {
    gate_ = std::make_unique<draining_gate>(*device_);
    how.alignment = 512;
    how.driver = device_->driver();
    how.gate = gate_.get();
  } else {
    how.persistent = memhandover::chunk_space::backing::process;
  }
  memory_ = std::make_unique<step::training_memory>(std::move(how));
}

}  // namespace sluice::bench
