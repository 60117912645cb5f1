/// What a benchmark's process does with pool memory, on the host or on a GPU: fills it, reads it.
///
/// On a GPU training's work goes through a `draining_gate`, which takes the place of the preloaded
/// gate: the program itself asks it before everything that it submits.
///
///   auto device = open_pool_device(backend_kind::host, 0);
///   if (!device->fill(where, bytes, 0x5a)) {
///     // … the driver refused …
///   }
///
/// Thread-safety: `pool_device` from one thread at a time, `draining_gate` from any.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "memhandover/device/cuda_driver.hpp"
#include "memhandover/device/device_memory.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::bench {

class pool_device {
 public:
  virtual ~pool_device() = default;
  /// The driver that `training_memory` is to use; null on the host.
  [[nodiscard]] virtual std::shared_ptr<memhandover::cuda_driver const> driver() const = 0;
  /// Writes `value` over memory and waits until it stands there. False: the driver refused.
  [[nodiscard]] virtual bool fill(std::byte* where, std::size_t bytes, std::uint8_t value) = 0;
  /// Copies memory out. False: the driver refused, and nothing has been copied.
  [[nodiscard]] virtual bool read(std::byte const* where, std::span<std::uint8_t> to) = 0;
  /// Copies into memory. False: the driver refused, and nothing has been copied.
  [[nodiscard]] virtual bool write(std::byte* where, std::span<std::uint8_t const> from) = 0;
  /// Waits until the device does nothing any more for this process. False: it has failed for good.
  [[nodiscard]] virtual bool synchronize() = 0;
  /// Adds one to the 32-bit word there by a kernel and waits. Returns the driver's result, 0 for
  /// success. Throws `unsupported` on the host, `internal` if the kernel cannot be loaded.
  [[nodiscard]] virtual int add_one_by_kernel(std::byte* where) = 0;
};

/// Throws `unsupported` if there is no GPU.
[[nodiscard]] std::unique_ptr<pool_device> open_pool_device(memhandover::backend_kind backend,
                                                            int ordinal);

/// A gate for a program that asks it: closed, it lets nothing in and is idle when the device is;
/// aborted, it drops what comes.
class draining_gate final : public step::launch_gate {
 public:
  explicit draining_gate(pool_device& device) : device_(device) {}

  bool close(std::int64_t deadline_ns) override;
  bool wait_idle(std::int64_t deadline_ns) override;
  void open() override;
  void abort_begin() override;
  void abort_end() override;
  void set_urgent(bool /*urgent*/) override {}

  /// Does `work` with the gate held open, or nothing while it is aborted. Returns whether it was
  /// done.
  template <typename Work>
  bool pass(Work&& work) {
    if (!enter()) {
      return false;
    }
    auto const leaving = [](draining_gate* gate) { gate->leave(); };
    std::unique_ptr<draining_gate, decltype(leaving)> const inside{this, leaving};
    work();
    return true;
  }

 private:
  [[nodiscard]] bool enter();
  void leave();

  pool_device& device_;
  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  int inside_ = 0;
  bool closed_ = false;
  bool aborted_ = false;
};

}  // namespace sluice::bench
