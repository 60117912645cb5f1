/// What a server's memory holds, written down in shared memory, so that a successor finds it when the
/// server has died.
///
///   header | directory: a word for each entry | cells
///
/// An entry is written into cells that nothing names, then named by one atomic store in the
/// directory; it is taken back by storing zero there. A writer that is killed between any two
/// instructions therefore leaves each entry whole or absent. A checksum over entry and generation
/// covers what a damaged segment may say all the same.
///
/// An entry names its chunks with their epochs; it counts only while all of them are still serving
/// in these epochs (layout.hpp).
///
/// Thread-safety: none; the owner serialises calls. One process at a time may write: the pool's
/// server, and the broker when there is none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

inline constexpr std::size_t max_manifest_entries = 1024;
inline constexpr std::size_t max_manifest_key = 255;           ///< bytes
inline constexpr std::size_t max_manifest_blob = 256U << 10U;  ///< bytes

/// A chunk, and the epoch since which it has been what it is.
struct chunk_epoch {
  std::uint32_t chunk = 0;
  std::uint32_t epoch = 0;
};

/// Where an entry stands, until it is withdrawn or replaced.
struct manifest_place {
  std::size_t index = 0;
  std::uint32_t generation = 0;
};

struct manifest_entry {
  std::string key;                  ///< names it among all entries
  std::vector<chunk_epoch> chunks;  ///< in the order of their addresses
  std::uint64_t offset = 0;         ///< of the first byte in the first chunk
  std::uint64_t bytes = 0;
  std::vector<std::byte> blob;  ///< whatever the server wants to know of it
  bool in_use = false;          ///< somebody may be changing what lies there; see `set_in_use`
  manifest_place place{};       ///< of one that has been read
};

/// Bytes of the manifest of a pool with so many chunks.
[[nodiscard]] std::size_t manifest_bytes(std::uint32_t chunk_count);

class manifest {
 public:
  /// Opens the segment of a pool with so many chunks. Throws `internal` naming what is wrong with it.
  manifest(int fd, std::uint32_t chunk_count, shared_segment::access how);

  /// Adds an entry, or replaces the one with its key. Throws `invalid_argument` for a key that is
  /// empty or too long or a blob that is too large, `out_of_memory` if there is no room; then the one
  /// with its key is as it was.
  manifest_place publish(manifest_entry const& entry);
  /// Says of the entry at `at`, if it still stands there, whether somebody may be changing what it
  /// names; one store, which stands as it is when this process is killed.
  void set_in_use(manifest_place at, bool used) noexcept;
  /// Removes the entry with that key, if there is one.
  void withdraw(std::string_view key);
  void clear();
  /// All entries that are whole, the latest first.
  [[nodiscard]] std::vector<manifest_entry> entries() const;

 private:
  struct place;

  [[nodiscard]] std::span<std::atomic<std::uint64_t>> directory() const noexcept;
  [[nodiscard]] std::byte* cell(std::size_t index) const noexcept;
  [[nodiscard]] std::vector<place> places() const;
  [[nodiscard]] std::size_t room_for(std::size_t cells) const;

  shared_segment segment_;
  std::size_t cells_;
};

}  // namespace sluice::memhandover
