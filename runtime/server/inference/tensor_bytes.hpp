/// The bytes of a tensor: memory of its own, or a part of some that several share and that lives as long as
/// one of them does, as a request's body or a file that is mapped when somebody looks. Copies share it too.
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

/// Bytes that are brought into memory when somebody looks at them. Thread-safe.
class distant_bytes {
 public:
  distant_bytes() = default;
  distant_bytes(distant_bytes const&) = delete;
  distant_bytes& operator=(distant_bytes const&) = delete;
  virtual ~distant_bytes() = default;

  /// All of them, as long as this lives; the same memory each time. Throws if there is no room.
  [[nodiscard]] virtual std::byte* bring() = 0;
  /// Those from `begin` on, which need not be brought for it. Throws likewise.
  virtual void read(std::size_t begin, std::span<std::byte> to) = 0;
};

class tensor_bytes {
 public:
  tensor_bytes() = default;
  // Whoever has a vector means its bytes.
  tensor_bytes(std::vector<std::byte> own)  // NOLINT(google-explicit-constructor)
      : tensor_bytes(std::make_shared<std::vector<std::byte>>(std::move(own))) {}
  tensor_bytes(std::shared_ptr<void const> keeper, std::span<std::byte> part)
      : keeper_(std::move(keeper)), near_(part.data()), size_(part.size()) {}
  /// A part of `from`.
  tensor_bytes(std::shared_ptr<distant_bytes> from, std::size_t begin, std::size_t size)
      : far_(std::move(from)), begin_(begin), size_(size) {}

  /// That are still to be written.
  [[nodiscard]] static tensor_bytes unwritten(std::size_t size) {
    std::shared_ptr<std::byte[]> const bytes = std::make_unique_for_overwrite<std::byte[]>(size);
    return {bytes, {bytes.get(), size}};
  }

  /// Of the same memory.
  [[nodiscard]] tensor_bytes part(std::size_t begin, std::size_t size) const {
    return far_ ? tensor_bytes{far_, begin_ + begin, size}
                : tensor_bytes{keeper_, {near_ + begin, size}};
  }

  /// Of distant bytes this, and what uses it, throws if they cannot be brought.
  [[nodiscard]] std::byte* data() { return far_ ? far_->bring() + begin_ : near_; }
  [[nodiscard]] std::byte const* data() const { return far_ ? far_->bring() + begin_ : near_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::span<std::byte const> span() const { return {data(), size_}; }

  /// Into `size()` bytes elsewhere: distant ones go there straight.
  void copy_to(std::byte* to) const {
    if (far_) {
      far_->read(begin_, {to, size_});
    } else {
      std::copy_n(near_, size_, to);
    }
  }

  friend bool operator==(tensor_bytes const& a, tensor_bytes const& b) {
    return std::ranges::equal(a.span(), b.span());
  }

 private:
  explicit tensor_bytes(std::shared_ptr<std::vector<std::byte>> const& own)
      : tensor_bytes(own, {own->data(), own->size()}) {}

  std::shared_ptr<void const> keeper_;
  std::byte* near_ = nullptr;
  std::shared_ptr<distant_bytes> far_;  ///< instead
  std::size_t begin_ = 0;               ///< of it
  std::size_t size_ = 0;
};

}  // namespace sluice::server
