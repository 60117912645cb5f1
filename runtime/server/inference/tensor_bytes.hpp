/// The bytes of a tensor: memory of its own, or a part of some that several share and that lives as long as
/// one of them does, as a request's body or a mapped file. Copies share it too.
///
///   tensor_bytes own{std::vector<std::byte>(8)};
///   auto body = std::make_shared<std::vector<std::byte>>(100);
///   tensor_bytes part{body, std::span{*body}.subspan(20, 8)};
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace sluice::server {

class tensor_bytes {
 public:
  tensor_bytes() = default;
  // Whoever has a vector means its bytes.
  tensor_bytes(std::vector<std::byte> own)  // NOLINT(google-explicit-constructor)
      : tensor_bytes(std::make_shared<std::vector<std::byte>>(std::move(own))) {}
  tensor_bytes(std::shared_ptr<void const> keeper, std::span<std::byte> part)
      : keeper_(std::move(keeper)), bytes_(part) {}

  /// That are still to be written.
  [[nodiscard]] static tensor_bytes unwritten(std::size_t size) {
    std::shared_ptr<std::byte[]> const bytes = std::make_unique_for_overwrite<std::byte[]>(size);
    return {bytes, {bytes.get(), size}};
  }

  /// Of the same memory.
  [[nodiscard]] tensor_bytes part(std::size_t begin, std::size_t size) const {
    return {keeper_, bytes_.subspan(begin, size)};
  }

  [[nodiscard]] std::byte* data() noexcept { return bytes_.data(); }
  [[nodiscard]] std::byte const* data() const noexcept { return bytes_.data(); }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[nodiscard]] std::span<std::byte const> span() const noexcept { return bytes_; }

  friend bool operator==(tensor_bytes const& a, tensor_bytes const& b) noexcept {
    return std::equal(a.bytes_.begin(), a.bytes_.end(), b.bytes_.begin(), b.bytes_.end());
  }

 private:
  explicit tensor_bytes(std::shared_ptr<std::vector<std::byte>> const& own)
      : keeper_(own), bytes_(*own) {}

  std::shared_ptr<void const> keeper_;
  std::span<std::byte> bytes_;
};

}  // namespace sluice::server
