/// Memory that outlives its server: what a server publishes of the memory that it holds stays in the
/// pool for a grace period when the server dies, and a successor can claim it, contents intact.
///
///   server      publish ──dies──► left ──claim──► the successor's, published as before
///                                   └──grace over, let go, or wanted by training──► free
///
/// Nothing is kept of a server that gives its memory back and leaves the pool; one that wants its successor to have it ends
/// without. The grace is the broker's, SLUICE_SERVER_GRACE_MS.
///
/// Thread-safety: all functions from any thread. What is left may be wanted by training at any time,
/// so that what `inherited` tells may have gone when it is claimed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::memhandover {

class placement;

inline constexpr std::size_t max_warm_key = 255;  ///< bytes

/// Memory that a dead server has left.
struct inheritance {
  std::string key;
  std::uint64_t bytes = 0;
  std::vector<std::byte> blob;  ///< what that server wanted to know of it
};

/// Chunks of that memory, this server's from now on.
struct claimed_chunks {
  std::vector<std::uint32_t> chunks;  ///< ascending
  std::vector<std::byte> blob;
  bool in_use = false;  ///< the dead server may have been changing their contents
};

class warm_memory {
 public:
  virtual ~warm_memory() = default;

  /// Says that `bytes` from `data` on, which lie in one live placement, hold what `key` names, and
  /// will not change while that is said. On CUDA the caller has waited for what writes there. An
  /// entry with the same key is replaced; it goes by itself when the placement dies. Throws
  /// `invalid_argument` for memory that is in no placement, a key of no or more than 255 bytes or a
  /// blob of more than 256 KiB, `out_of_memory` if the manifest is full. Takes time in proportion to
  /// what has been published: some 10 µs for each MiB of entries.
  virtual void publish(std::string_view key, std::byte const* data, std::uint64_t bytes,
                       std::span<std::byte const> blob) = 0;
  /// The same of these chunks of this server's, ascending, in each of which some bytes are of what `key`
  /// names; `blob` (256 KiB at most) says which. It goes by itself when one of the chunks is given back.
  virtual void publish_chunks(std::string_view key, std::span<std::uint32_t const> chunks,
                              std::span<std::byte const> blob) = 0;
  virtual void withdraw(std::string_view key) = 0;
  /// While `used`, what is published under `key` may be changing; a successor is told so. Takes well below
  /// a microsecond.
  virtual void set_in_use(std::string_view key, bool used) = 0;

  /// What an earlier server has left and nobody has claimed yet.
  [[nodiscard]] virtual std::vector<inheritance> inherited() const = 0;
  /// That memory as it was, now this server's and published under its key; empty if it has gone.
  /// Nothing of it is touched. Throws `out_of_memory` if it cannot be mapped; then it is still left.
  [[nodiscard]] virtual placement claim(std::string_view key) = 0;
  /// Those chunks, this server's until they are given back (`chunk_pool::give_back_chunks`), and published
  /// under their key; nothing if they have gone. Others that share some of them may be claimed as well.
  [[nodiscard]] virtual std::optional<claimed_chunks> claim_chunks(std::string_view key) = 0;
  /// What is left stays however long this server takes to claim it, until `release_rest`.
  virtual void hold_left() = 0;
  /// Gives back what is left under `key`; memory that it shares with another entry stays.
  virtual void release(std::string_view key) = 0;
  /// Gives back all that is left.
  virtual void release_rest() = 0;
};

}  // namespace sluice::memhandover
