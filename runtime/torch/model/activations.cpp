#include "runtime/torch/model/activations.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/activation_memory.hpp"
#include "runtime/server/hosting/gate_memory.hpp"
#include "runtime/torch/model/detail/computation.hpp"

namespace sluice::server {
namespace {

/// Of less the pool's bookkeeping would cost more than the tensor.
constexpr std::size_t least_bytes = 64 << 10;

class host_activations final : public activations {
 public:
  explicit host_activations(std::shared_ptr<memhandover::serving_pool> pool)
      : memory_(std::move(pool), activation_memory::freed::kept) {}

  void give_back() override { (void)memory_.give_back(); }
  [[nodiscard]] activation_memory& memory() noexcept { return memory_; }

 private:
  activation_memory memory_;
};

/// For as long as the process lives: tensors are freed until its end.
std::shared_ptr<host_activations>& of_host() {
  static auto& one = *std::make_unique<std::shared_ptr<host_activations>>().release();
  return one;
}

c10::Allocator* torch_allocator = nullptr;

/// False for an address that is torch's own.
bool free_ours(void* address) noexcept {
  auto& memory = of_host()->memory();
  auto const* const at = static_cast<std::byte*>(address);
  if (auto const found = memory.containing(at)) {
    detail::computation::count(-static_cast<std::int64_t>(found->bytes));
  }
  return memory.free(at);
}

void free_pools(void* address) {
  (void)free_ours(address);
}

/// For addresses whose origin is not known: the pool's, or torch's own.
void free_any(void* address) {
  if (!free_ours(address)) {
    torch_allocator->raw_deleter()(address);
  }
}

class activation_allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < least_bytes || !detail::computation::runs_here()) {
      return torch_allocator->allocate(bytes);
    }
    void* address = nullptr;
    try {
      address = of_host()->memory().allocate(bytes);
    } catch (error const& failure) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory: ", failure.what());
    }
    detail::computation::count(static_cast<std::int64_t>(bytes));
    return {address, address, free_pools, c10::Device(c10::DeviceType::CPU)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return free_any; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

class device_activations final : public activations {
 public:
  explicit device_activations(torch_device device) : device_(device) {}
  void give_back() override { empty_cache(device_); }

 private:
  torch_device device_;
};

}  // namespace

std::shared_ptr<activations> serve_activations(std::shared_ptr<memhandover::serving_pool> pool,
                                               torch_device device) {
  if (device.is_cuda()) {
    auto memory =
        std::make_shared<activation_memory>(std::move(pool), activation_memory::freed::given_back);
    (void)answer_from_pool(std::move(memory));  // else the log says so
    return std::make_shared<device_activations>(device);
  }
  of_host() = std::make_shared<host_activations>(std::move(pool));
  torch_allocator = c10::GetCPUAllocator();
  static activation_allocator ours;
  constexpr std::uint8_t above_the_default = 200;
  c10::SetCPUAllocator(&ours, above_the_default);
  return of_host();
}

void empty_cache(torch_device device) {
  if (device.is_cuda()) {
    at::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
  }
}

}  // namespace sluice::server
