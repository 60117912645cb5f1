/// What is parked and where to, without a pool: chunks mapped one after the other on the first GPU, and pages
/// of shared memory that its driver has pinned.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "memhandover/device/cuda_driver.hpp"

namespace sluice::bench {

/// Makes the GPU's primary context current in the calling thread.
class device_chunks {
 public:
  device_chunks(std::shared_ptr<memhandover::cuda_driver const> driver, std::size_t count,
                std::size_t chunk_bytes);
  device_chunks(device_chunks const&) = delete;
  device_chunks& operator=(device_chunks const&) = delete;
  ~device_chunks();

  [[nodiscard]] std::byte* at(std::size_t chunk) const noexcept {
    return reinterpret_cast<std::byte*>(where_) + chunk * chunk_bytes_;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return handles_.size() * chunk_bytes_; }

 private:
  std::shared_ptr<memhandover::cuda_driver const> driver_;
  std::size_t chunk_bytes_;
  std::vector<CUmemGenericAllocationHandle> handles_;
  CUdeviceptr where_ = 0;
};

class pinned_pages {
 public:
  pinned_pages(std::shared_ptr<memhandover::cuda_driver const> driver, std::size_t bytes);
  pinned_pages(pinned_pages const&) = delete;
  pinned_pages& operator=(pinned_pages const&) = delete;
  ~pinned_pages();

  [[nodiscard]] std::byte* data() const noexcept { return where_; }

 private:
  std::shared_ptr<memhandover::cuda_driver const> driver_;
  std::size_t bytes_;
  std::byte* where_ = nullptr;
};

}  // namespace sluice::bench
