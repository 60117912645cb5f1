#include "benchmarks/pool_device.hpp"

#include <cuda.h>

#include <chrono>
#include <cstring>
#include <string>

#include "benchmarks/driver_function.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::bench {
namespace {

using memhandover::backend_kind;
using memhandover::cuda_driver;

class host_device final : public pool_device {
 public:
  [[nodiscard]] std::shared_ptr<cuda_driver const> driver() const override { return nullptr; }
  [[nodiscard]] bool fill(std::byte* where, std::size_t bytes, std::uint8_t value) override {
    std::memset(where, value, bytes);
    return true;
  }
  [[nodiscard]] bool read(std::byte const* where, std::span<std::uint8_t> to) override {
    std::memcpy(to.data(), where, to.size());
    return true;
  }
  [[nodiscard]] bool write(std::byte* where, std::span<std::uint8_t const> from) override {
    std::memcpy(where, from.data(), from.size());
    return true;
  }
  [[nodiscard]] bool synchronize() override { return true; }
  [[nodiscard]] int add_one_by_kernel(std::byte* /*where*/) override {
    throw error{error_kind::unsupported, "the host runs no kernels"};
  }
};

/// Runs on every GPU since Volta; the driver compiles it for the one that is there.
constexpr char const* add_one_ptx = R"(
.version 6.0
.target sm_70
.address_size 64
.visible .entry add_one(.param .u64 where)
{
  .reg .b64 %at<3>;
  .reg .b32 %word<3>;
  ld.param.u64 %at1, [where];
  cvta.to.global.u64 %at2, %at1;
  ld.volatile.global.u32 %word1, [%at2];
  add.u32 %word2, %word1, 1;
  st.volatile.global.u32 [%at2], %word2;
  ret;
}
)";

class cuda_device final : public pool_device {
 public:
  explicit cuda_device(int ordinal) : driver_(cuda_driver::open()) {
    CUdevice device = 0;
    driver_->check(driver_->cuDeviceGet(&device, ordinal),
                   "cannot use GPU " + std::to_string(ordinal));
    driver_->check(driver_->cuDevicePrimaryCtxRetain(&context_, device),
                   "cannot start GPU " + std::to_string(ordinal));
    use_context();
  }

  [[nodiscard]] std::shared_ptr<cuda_driver const> driver() const override { return driver_; }

  [[nodiscard]] bool fill(std::byte* where, std::size_t bytes, std::uint8_t value) override {
    use_context();
    return set_(address(where), value, bytes) == CUDA_SUCCESS && synchronize_() == CUDA_SUCCESS;
  }
  [[nodiscard]] bool read(std::byte const* where, std::span<std::uint8_t> to) override {
    use_context();
    return copy_out_(to.data(), address(where), to.size()) == CUDA_SUCCESS;
  }
  [[nodiscard]] bool write(std::byte* where, std::span<std::uint8_t const> from) override {
    use_context();
    return copy_in_(address(where), from.data(), from.size()) == CUDA_SUCCESS;
  }
  [[nodiscard]] bool synchronize() override {
    use_context();
    return synchronize_() == CUDA_SUCCESS;
  }

  [[nodiscard]] int add_one_by_kernel(std::byte* where) override {
    use_context();
    if (add_one_ == nullptr) {
      CUmodule loaded = nullptr;
      driver_->check(
          driver_function<decltype(&::cuModuleLoadData)>("cuModuleLoadData")(&loaded, add_one_ptx),
          "cannot load the kernel");
      driver_->check(driver_function<decltype(&::cuModuleGetFunction)>("cuModuleGetFunction")(
                         &add_one_, loaded, "add_one"),
                     "cannot find the kernel");
    }
    auto at = address(where);
    void* parameters[] = {&at};
    auto const launched = driver_function<decltype(&::cuLaunchKernel)>("cuLaunchKernel")(
        add_one_, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    return static_cast<int>(launched != CUDA_SUCCESS ? launched : synchronize_());
  }

 private:
  static CUdeviceptr address(std::byte const* where) {
    return reinterpret_cast<CUdeviceptr>(where);
  }

  /// The calling thread may be the pool's control thread, which has no context yet.
  void use_context() const {
    driver_->check(driver_->cuCtxSetCurrent(context_), "cannot use the GPU");
  }

  std::shared_ptr<cuda_driver const> driver_;
  CUcontext context_ = nullptr;
  CUfunction add_one_ = nullptr;
  decltype(&::cuCtxSynchronize) synchronize_ =
      driver_function<decltype(&::cuCtxSynchronize)>("cuCtxSynchronize");
  decltype(&::cuMemcpyDtoH) copy_out_ =
      driver_function<decltype(&::cuMemcpyDtoH)>("cuMemcpyDtoH_v2");
  decltype(&::cuMemcpyHtoD) copy_in_ =
      driver_function<decltype(&::cuMemcpyHtoD)>("cuMemcpyHtoD_v2");
  decltype(&::cuMemsetD8) set_ = driver_function<decltype(&::cuMemsetD8)>("cuMemsetD8_v2");
};

}  // namespace

std::unique_ptr<pool_device> open_pool_device(backend_kind backend, int ordinal) {
  if (backend == backend_kind::host) {
    return std::make_unique<host_device>();
  }
  return std::make_unique<cuda_device>(ordinal);
}

bool draining_gate::close(std::int64_t deadline_ns) {
  std::unique_lock lock{mutex_};
  closed_ = true;
  auto const left = std::chrono::nanoseconds{deadline_ns - memhandover::monotonic_ns()};
  if (changed_.wait_for(lock, left, [this] { return inside_ == 0; })) {
    return true;
  }
  closed_ = false;
  changed_.notify_all();
  return false;
}

bool draining_gate::wait_idle(std::int64_t /*deadline_ns*/) {
  return device_.synchronize();
}

void draining_gate::open() {
  std::lock_guard const lock{mutex_};
  closed_ = false;
  changed_.notify_all();
}

void draining_gate::abort_begin() {
  std::lock_guard const lock{mutex_};
  aborted_ = true;
}

void draining_gate::abort_end() {
  std::lock_guard const lock{mutex_};
  aborted_ = false;
}

bool draining_gate::enter() {
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return !closed_; });
  if (aborted_) {
    return false;
  }
  ++inside_;
  return true;
}

void draining_gate::leave() {
  std::lock_guard const lock{mutex_};
  --inside_;
  changed_.notify_all();
}

}  // namespace sluice::bench
