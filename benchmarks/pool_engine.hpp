/// An engine without a model: chunks of a pool at addresses of its own, which it gives up when they are demanded, and
/// gets again when it asks.
///
///   pool_engine engine{broker, "engine", device->driver()};
///   engine.grow(16, deadline, "weights", [&](std::byte* where) { first_look(where); });
///   engine.visit([&](std::byte* where) { use(where); });
///   engine.shrink(3);
///
/// Chunk i always lies at the same address, and while the engine has not got it that has no memory: an access
/// faults, a copy is refused. What the functions are given runs while nothing is taken away; work on a device
/// that it begins must have ended when it returns.
///
/// Thread-safety: all functions from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/client/tenant_client.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/chunk_notes.hpp"

namespace sluice::bench {

class pool_engine {
 public:
  using use = std::function<void(std::byte* where)>;

  /// Joins the pool. `driver`: of the pool's GPU; null on the host. Throws as `tenant_client::join` and
  /// `open_device_memory` do.
  pool_engine(memhandover::broker_options const& broker, std::string const& name,
              std::shared_ptr<memhandover::cuda_driver const> driver = nullptr);
  pool_engine(pool_engine const&) = delete;
  pool_engine& operator=(pool_engine const&) = delete;
  ~pool_engine();

  [[nodiscard]] std::uint64_t chunk_bytes() const noexcept;
  /// Asks for `count` chunks, maps those that it is granted and zeroes what was another's; then each is used. Returns
  /// how many came.
  std::uint32_t grow(std::uint32_t count, std::chrono::steady_clock::time_point deadline,
                     std::string_view what, use const& each);
  /// Gives up to `count` of its chunks back on its own account.
  void shrink(std::uint32_t count);
  /// Each chunk that it has.
  void visit(use const& each);
  /// Each address where it had a chunk once, and has none.
  void visit_lost(use const& each);

  [[nodiscard]] std::uint32_t held() const noexcept { return held_; }
  /// Demands that it has answered with chunks.
  [[nodiscard]] std::uint64_t parked() const noexcept { return parked_; }

 private:
  enum class place : std::uint8_t { never_had, here, lost };
  using chunks = std::vector<std::uint32_t>;

  [[nodiscard]] std::byte* at(std::uint32_t chunk) const noexcept;
  [[nodiscard]] memhandover::demand_answer park(memhandover::demand const& wanted);
  void collect();
  void take_in(std::uint32_t chunk);
  void unmap(std::span<std::uint32_t const> gone);
  [[nodiscard]] chunks those(place where) const;

  std::mutex mutex_;  ///< guards what follows
  std::unique_ptr<memhandover::device_memory> memory_;
  std::byte* base_ = nullptr;
  std::vector<place> places_;      ///< by chunk
  chunks spare_;                   ///< granted, and not mapped yet
  std::vector<bool> needs_scrub_;  ///< by chunk
  std::optional<memhandover::chunk_notes> notes_;
  std::atomic<std::uint32_t> held_{0};
  std::atomic<std::uint64_t> parked_{0};
  std::unique_ptr<memhandover::tenant_client> client_;
};

}  // namespace sluice::bench
