/// Of large bodies that wait until they are turned into tensors: how much there may be at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace sluice::server {

/// The part that a large body has of all that may wait at once, for as long as it does.
class body_share {
 public:
  body_share() = default;
  body_share(body_share&& other) noexcept
      : of_(std::exchange(other.of_, nullptr)), bytes_(other.bytes_) {}
  body_share& operator=(body_share&& other) noexcept {
    std::swap(of_, other.of_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  body_share(body_share const&) = delete;
  body_share& operator=(body_share const&) = delete;
  ~body_share() {
    if (of_ != nullptr) *of_ -= bytes_;
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// From now on so large; false where others than it, and the `own` bytes beside it, are more than `most` already.
  [[nodiscard]] bool grow(std::atomic<std::uint64_t>& of, std::uint64_t most, std::uint64_t bytes,
                          std::uint64_t own = 0) {
    // In one step, or two that grow at once would refuse each other.
    auto const others = of.fetch_add(bytes - bytes_) - bytes_;
    if (others > most + own) {
      of -= bytes - bytes_;
      return false;
    }
    of_ = &of;
    bytes_ = bytes;
    return true;
  }

 private:
  std::atomic<std::uint64_t>* of_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::server
