/// The host backend: all chunks are ranges of one memfd.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "memhandover/device/device_memory.hpp"

namespace sluice::memhandover {

class host_memory final : public device_memory {
 public:
  host_memory(pool_shape const& shape, int fd);

  [[nodiscard]] pool_shape const& shape() const noexcept override { return shape_; }
  [[nodiscard]] std::byte* reserve(std::uint32_t chunks) override;
  void release(std::byte* where, std::uint32_t chunks) noexcept override;
  void map(std::byte* where, std::span<std::uint32_t const> chunks) override;
  void unmap(std::byte* where, std::uint32_t count) noexcept override;
  void unmap_soon(std::byte* where, std::span<std::uint32_t const> chunks) noexcept override;
  void revoke(std::byte* where, std::span<std::uint32_t const> chunks) override;
  void sweep() noexcept override;
  void map_private(std::byte* where, std::uint32_t count) override;
  /// Punches the chunks out of the memfd: they read as zero, and their memory goes back to the
  /// system until touched.
  void scrub(std::byte* where, std::span<std::uint32_t const> chunks) override;

 private:
  void set_aside(std::byte* where, std::span<std::uint32_t const> chunks) noexcept;

  pool_shape shape_;
  int fd_;  ///< borrowed
  std::mutex mutex_;
  std::vector<std::pair<std::byte*, std::size_t>> aside_;  ///< for `sweep` to unmap
};

/// The memfd of a new pool.
[[nodiscard]] pool_descriptors create_host_chunks(pool_shape const& shape);

}  // namespace sluice::memhandover
