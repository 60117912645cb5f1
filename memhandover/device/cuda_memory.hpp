/// The CUDA backend: chunks are handles of the driver's virtual memory management, imported from
/// descriptors.
///
/// The driver's rules, which shape this code: a handle is mapped whole; unmapping and setting
/// access cost about 13 and 21 µs a handle and hardly depend on its size; access is set once for a
/// run of mappings; neither call waits for running kernels; importing costs about 18 µs, so each
/// chunk is imported once, when it is first mapped.
#pragma once

#include <mutex>

#include "memhandover/device/cuda_driver.hpp"
#include "memhandover/device/device_memory.hpp"

namespace sluice::memhandover {

class cuda_memory final : public device_memory {
 public:
  /// Uses the device's primary context, which it makes current in a calling thread that has none.
  cuda_memory(pool_shape const& shape, pool_descriptors const& descriptors, int device,
              std::shared_ptr<cuda_driver const> driver);
  cuda_memory(cuda_memory const&) = delete;
  cuda_memory& operator=(cuda_memory const&) = delete;
  ~cuda_memory() override;

  [[nodiscard]] pool_shape const& shape() const noexcept override { return shape_; }
  [[nodiscard]] std::byte* reserve(std::uint32_t chunks) override;
  void release(std::byte* where, std::uint32_t chunks) noexcept override;
  void map(std::byte* where, std::span<std::uint32_t const> chunks) override;
  void unmap(std::byte* where, std::uint32_t count) noexcept override;
  void revoke(std::byte* where, std::span<std::uint32_t const> chunks) override {
    unmap(where, static_cast<std::uint32_t>(chunks.size()));
  }
  void map_private(std::byte* where, std::uint32_t count) override;
  void scrub(std::byte* where, std::span<std::uint32_t const> chunks) override;

 private:
  CUmemGenericAllocationHandle import(std::uint32_t chunk);
  void use_context() const;

  pool_shape shape_;
  pool_descriptors const& descriptors_;
  int device_;
  std::shared_ptr<cuda_driver const> driver_;
  std::mutex mutex_;                                   ///< guards `handles_`
  std::vector<CUmemGenericAllocationHandle> handles_;  ///< by chunk; 0: not imported yet
  CUcontext context_ = nullptr;                        ///< the device's primary one
  CUstream stream_ = nullptr;                          ///< for scrubbing
};

/// Creates the chunks of a new pool on `device` and exports them. `pool_bytes` 0: all but
/// `headroom` of what is free. The chunks live as long as the descriptors; the process that creates
/// them may exit.
struct cuda_chunks {
  pool_shape shape;
  pool_descriptors descriptors;
};

[[nodiscard]] cuda_chunks create_cuda_chunks(int device, std::uint64_t pool_bytes,
                                             std::uint64_t chunk_bytes);

}  // namespace sluice::memhandover
