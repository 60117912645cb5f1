/// A store that ranks on several hosts reach over the network, through the table of abi/store_api.h.
///
///   open ──a call fails, or the process ends──► gone, for good: no call does anything any more
///
/// It goes at the first failure, since nobody knows then what it has done. The reason is printed once.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "abi/store_api.h"

namespace sluice::nccl_shim {

class store {
 public:
  /// Where the server listens, and how long anything may take before it counts as gone.
  struct address {
    std::string host;
    std::uint16_t port = 0;
    std::chrono::milliseconds patience{};
  };

  /// By the library of that path. Nothing if that fails; the reason has been printed.
  [[nodiscard]] static std::unique_ptr<store> open(std::string const& library, address const& at);
  store(store const&) = delete;
  store& operator=(store const&) = delete;
  ~store();

  [[nodiscard]] bool is_gone() const noexcept { return gone_.load(std::memory_order_acquire); }
  [[nodiscard]] address const& at() const noexcept { return at_; }
  /// "the store at HOST:PORT".
  [[nodiscard]] std::string name() const;

  struct written {
    std::string const& key;
    std::span<std::byte const> value;
  };
  /// All of them or none, where the server lives on; in this order. At most two.
  void set(std::span<written const> all) noexcept;
  /// Sets it if it is as expected, or missing and nothing is expected; what it is then. `room` must hold
  /// the longest value; nothing if the store is gone.
  [[nodiscard]] std::optional<std::span<std::byte>> compare_set(std::string const& key,
                                                                std::span<std::byte const> expected,
                                                                std::span<std::byte const> desired,
                                                                std::span<std::byte> room) noexcept;
  /// Reads keys into values of a fixed size each; false if the store is gone. A single one that is missing
  /// leaves its value as it is; of several each has to be there.
  [[nodiscard]] bool get(std::span<std::string const> keys, std::span<std::byte> values) noexcept;
  /// The sum; nothing if the store is gone.
  [[nodiscard]] std::optional<std::int64_t> add(std::string const& key,
                                                std::int64_t summand) noexcept;
  void remove(std::string const& key) noexcept;

  /// The process ends, and what calls need with it: makes it go, and waits a moment for those under way.
  void retire() noexcept;

 private:
  class call;
  store(sluice_store_api const* table, sluice_store* of, address at) noexcept;
  /// Whether a call has been made.
  [[nodiscard]] bool has(int made, sluice_store_error const& why) noexcept;

  sluice_store_api const* table_;
  sluice_store* of_;
  address at_;
  std::atomic<bool> gone_{false};
  std::atomic<int> under_way_{0};
};

}  // namespace sluice::nccl_shim
