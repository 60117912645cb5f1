#include "memhandover/device/device_memory.hpp"

#include <fmt/format.h>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_memory.hpp"
#include "memhandover/device/host_memory.hpp"

namespace sluice::memhandover {

char const* to_string(backend_kind backend) noexcept {
  return backend == backend_kind::cuda ? "cuda" : "host";
}

std::string name_of(pool_shape const& shape) {
  auto const number = std::to_string(shape.device);
  if (shape.backend == backend_kind::cuda) {
    return "GPU " + number;
  }
  return shape.device == 0 ? "host memory" : "host memory " + number;
}

std::string to_string(gpu_uuid const& gpu) {
  auto const digits = fmt::format("{:02x}", fmt::join(gpu, ""));
  return fmt::format("GPU-{}-{}-{}-{}-{}", digits.substr(0, 8), digits.substr(8, 4),
                     digits.substr(12, 4), digits.substr(16, 4), digits.substr(20));
}

std::byte* device_memory::map_anew(std::span<std::uint32_t const> chunks) {
  auto const count = static_cast<std::uint32_t>(chunks.size());
  auto* const where = reserve(count);
  try {
    map(where, chunks);
  } catch (...) {
    release(where, count);
    throw;
  }
  return where;
}

void device_memory::unmap_and_release(std::byte* where, std::uint32_t count) noexcept {
  unmap(where, count);
  release(where, count);
}

std::unique_ptr<device_memory> open_device_memory(pool_shape const& shape,
                                                  pool_descriptors const& descriptors,
                                                  std::shared_ptr<cuda_driver const> driver) {
  auto const expected = shape.backend == backend_kind::host ? 1U : shape.chunk_count;
  if (descriptors.size() != expected) {
    throw error{error_kind::internal, "the pool has " + std::to_string(shape.chunk_count) +
                                          " chunks but came with " +
                                          std::to_string(descriptors.size()) + " descriptors"};
  }
  if (shape.backend == backend_kind::host) {
    return std::make_unique<host_memory>(shape, descriptors.front().get());
  }
  if (driver == nullptr) {
    driver = cuda_driver::open();
  }
  return std::make_unique<cuda_memory>(shape, descriptors, shape.device, std::move(driver));
}

}  // namespace sluice::memhandover
