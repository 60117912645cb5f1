/// How long the device needs for what is launched, learned while it runs: the mean of each kind of
/// work.
///
/// A kind is a function with its launch dimensions, a graph, or a copy of a size; `work_key` is a
/// hash of that. Kinds that no longer fit into the table stay unmeasured.
///
/// Thread-safety: everything from any thread, without locks. Two measurements of one kind at the
/// same instant may cost one of them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace sluice::gate {

/// A kind of work; 0: unknown.
using work_key = std::uint64_t;

/// The kind that these numbers (entry point, function, dimensions, bytes) describe.
[[nodiscard]] constexpr work_key key_of_work(std::initializer_list<std::uint64_t> parts) noexcept {
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (std::uint64_t const part : parts) {
    hash = (hash ^ part) * 0xff51afd7ed558ccd;  // MurmurHash3's finaliser, once a part
    hash ^= hash >> 32U;
  }
  return hash | 1U;
}

class durations {
 public:
  struct estimate {
    std::chrono::nanoseconds mean;
    std::uint32_t measured;  ///< how often; 0: `mean` says nothing
  };

  [[nodiscard]] estimate of(work_key key) const noexcept;
  void learn(work_key key, std::chrono::nanoseconds took) noexcept;
  /// Whether there is, or could be, a place for it.
  [[nodiscard]] bool has_place(work_key key) const noexcept;

 private:
  struct place {
    std::atomic<work_key> key{0};
    /// Nanoseconds in the upper 48 bits, measurements (up to 65535) below.
    std::atomic<std::uint64_t> value{0};
  };
  static constexpr std::size_t size = 8192;
  static constexpr std::size_t reach = 16;  // places that a key may lie behind its own

  /// The key's place, or the empty one where it would go.
  template <typename Places>
  [[nodiscard]] static auto find(Places& places, work_key key) noexcept -> decltype(places.data());
  [[nodiscard]] static std::size_t first(work_key key) noexcept { return (key >> 20U) % size; }

  std::array<place, size> places_{};
};

}  // namespace sluice::gate
