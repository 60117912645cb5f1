/// A computation of a model by the calling thread, as long as it lives: what it has needed of memory at most.
///
///   computation now{device, most};
///   // … the model runs …
///
/// On the host that is what comes out of the pool for this thread. On a GPU torch counts for all threads together, so
/// it is measured only where no other computation ran meanwhile; the first ones, and then one of 32, since it resets the
/// peak that torch keeps.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

namespace sluice::server::detail {

/// Of a model, the most that was seen. Thread-safe.
struct activation_peak {
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> computations{0};
};

class computation {
 public:
  computation(at::Device device, activation_peak& most);
  computation(computation const&) = delete;
  computation& operator=(computation const&) = delete;
  ~computation();

  [[nodiscard]] static bool runs_here() noexcept;
  /// Bytes that the calling thread has got from the pool, or freed.
  static void count(std::int64_t bytes) noexcept;

 private:
  at::Device const device_;
  activation_peak& most_;
  std::uint64_t number_ = 0;  ///< of all computations; 0: it is not measured
  std::int64_t before_ = 0;   ///< bytes of the device when it began
};

}  // namespace sluice::server::detail
