#include "memhandover/device_memory.hpp"

#include "memhandover/detail/cuda_memory.hpp"
#include "memhandover/detail/host_memory.hpp"
#include "memhandover/error.hpp"

namespace sluice::memhandover {

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
    return std::make_unique<detail::host_memory>(shape, descriptors.front().get());
  }
  if (driver == nullptr) {
    driver = cuda_driver::open();
  }
  return std::make_unique<detail::cuda_memory>(shape, descriptors, shape.device, std::move(driver));
}

}  // namespace sluice::memhandover
