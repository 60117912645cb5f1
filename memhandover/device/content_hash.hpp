/// A 128-bit hash of a chunk's contents and whether all of it is zero, in one pass.
///
/// The hash is a sum over 16-byte words of a one-to-one mixture of word and place, so that words may
/// be taken in any order, and a change of a single word always changes it. It says whether contents
/// are those of before; it is no defence against somebody who chooses contents that collide.
///
///   for (; next < chunks.size() && hashes->room(); ++next) {
///     hashes->begin(chunks[next], chunk_bytes);
///   }
///   while (auto const hash = hashes->poll()) {
///     if (hash->zero() || *hash == kept[done]) { give(chunks[done]); }
///     ++done;
///   }
///
/// Thread-safety: functions are pure; a `content_hasher` belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>

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

/// The kernel `content_hash(base, words, result)`: writes the three words at `result`, memory that the
/// device can write. `base` is aligned to 16. Any grid of one dimension, blocks of a multiple of 32
/// threads. One launch of a module at a time: its sums are the module's, and zero in between.
extern char const* const content_hash_ptx;

/// Hashes chunks one after the other on a stream of its own, up to a window of them at once, and
/// disturbs no capture of another thread. The device's context is current in the calling thread.
///
/// Chunks stay as they are until `poll` has said their hash, `abandon` has forgotten it, or a call
/// has thrown: what the driver says. By then no chunk is read any more, and hashes that were not said
/// are forgotten. The hasher can be used on.
class content_hasher {
 public:
  static constexpr std::size_t window = 16;

  virtual ~content_hasher() = default;

  /// Whether there are hashes at all. Where there are not, all contents count as changed.
  [[nodiscard]] bool available() const noexcept { return refusal().empty(); }
  /// Why there are not; logged once, when the hasher is opened.
  [[nodiscard]] virtual std::string const& refusal() const noexcept = 0;

  /// `bytes` and the address are multiples of 16. Throws `invalid_argument` if they are not or there
  /// is no room, `unsupported` if there are no hashes.
  virtual void begin(std::byte const* chunk, std::size_t bytes) = 0;
  /// The hash of the chunk that was begun first and not said yet; nothing while the device is at it,
  /// and when there is none. Never waits.
  [[nodiscard]] virtual std::optional<content_hash> poll() = 0;
  /// Waits for those in flight, and forgets all that were not said.
  virtual void abandon() noexcept = 0;

  /// Begun and not said.
  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;
  [[nodiscard]] bool room() const noexcept { return in_flight() < window; }
};

/// `driver`: null for the host backend, where `begin` hashes at once. A driver that lacks a function
/// or cannot load the kernel is no error: then the hasher is not available.
[[nodiscard]] std::unique_ptr<content_hasher> open_content_hasher(
    std::shared_ptr<cuda_driver const> driver);

}  // namespace sluice::memhandover
