/// A 128-bit hash of a chunk's contents and whether all of it is zero, in one pass.
///
/// The hash is a sum over 16-byte words of a one-to-one mixture of word and place, so that words may
/// be taken in any order, and a change of a single word always changes it. It says whether contents
/// are those of before; it is no defence against somebody who chooses contents that collide.
///
///   content_hash const before = hash_contents(chunk);
///   before.zero();
///
/// Thread-safety: pure functions; `content_hasher` belongs to one thread.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

namespace sluice::memhandover {

struct cuda_driver;

struct content_hash {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t bits = 0;  ///< all 8-byte words or-ed: 0 says that the contents are zero

  [[nodiscard]] bool zero() const noexcept { return bits == 0; }
  bool operator==(content_hash const&) const = default;
};

[[nodiscard]] constexpr std::uint64_t mix_word(std::uint64_t word) noexcept {
  word ^= word >> 32U;
  word *= 0xD6E8FEB86659FD93U;
  return word ^ (word >> 29U);
}

/// What the word of the halves `low` and `high` at `place` adds.
constexpr void add_word(content_hash& to, std::uint64_t place, std::uint64_t low,
                        std::uint64_t high) noexcept {
  auto const mixed = mix_word(low + place * 0x9E3779B97F4A7C15U);
  auto const first = mix_word(mixed ^ high);
  to.first += first;
  to.second += mix_word(mixed ^ (first + place * 0xC2B2AE3D27D4EB4FU));
  to.bits |= low | high;
}

/// The same as the kernel, on this processor. The size is a multiple of 16.
[[nodiscard]] inline content_hash hash_contents(std::span<std::byte const> contents) noexcept {
  content_hash result;
  for (std::size_t place = 0; place < contents.size() / 16; ++place) {
    std::uint64_t halves[2];
    std::memcpy(halves, contents.data() + place * 16, sizeof halves);
    add_word(result, place, halves[0], halves[1]);
  }
  return result;
}

/// The kernel `content_hash(base, words, result)`: adds to the three words at `result`, which the
/// caller has zeroed. Any grid of one dimension, blocks of a multiple of 32 threads.
extern char const* const content_hash_ptx;

/// Hashes memory of a GPU, whose context is current in the calling thread. Throws what the driver
/// says; where the kernel cannot be loaded, construction does.
class content_hasher {
 public:
  explicit content_hasher(std::shared_ptr<cuda_driver const> driver);
  content_hasher(content_hasher const&) = delete;
  content_hasher& operator=(content_hasher const&) = delete;
  ~content_hasher();

  /// Waits for the kernel. `bytes` is a multiple of 16.
  [[nodiscard]] content_hash hash(std::byte const* where, std::size_t bytes);

 private:
  void release() noexcept;

  std::shared_ptr<cuda_driver const> driver_;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
  CUdeviceptr result_ = 0;
};

}  // namespace sluice::memhandover
