/// A pool's shared memory as objects: the read-only view that everybody has, and the mailboxes.
///
/// Opening checks sizes, magic, layout version, checksum and constants, so that a foreign or damaged
/// segment is an error with a sentence and never a crash; counts and indices read later are checked
/// against the header's constants.
///
/// Thread-safety: all accessors are atomic loads, or stores by the field's owner as layout.hpp
/// names it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/layout.hpp"

namespace sluice::memhandover {

/// A mapped shared segment; unmapped when it dies.
class shared_segment {
 public:
  enum class access { read_only, read_write };

  shared_segment() noexcept = default;
  /// Maps all of `fd`, which stays the caller's. Throws `internal` if that fails.
  shared_segment(int fd, access how);
  shared_segment(shared_segment&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  shared_segment& operator=(shared_segment&& other) noexcept;
  shared_segment(shared_segment const&) = delete;
  shared_segment& operator=(shared_segment const&) = delete;
  ~shared_segment();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The descriptors of a pool: whoever holds all of them can bring it back to life.
struct pool_files {
  unique_fd ledger;
  unique_fd mailroom;
  unique_fd manifest;  ///< see manifest.hpp
  unique_fd doorbell;  ///< eventfd that wakes the ledger's writer
  pool_descriptors chunks;
};

class ledger_view {
 public:
  ledger_view() noexcept = default;
  /// Opens the two segments. Throws `internal` naming what is wrong with them.
  ledger_view(int ledger_fd, int mailroom_fd, shared_segment::access how);

  [[nodiscard]] pool_shape const& shape() const noexcept { return shape_; }
  [[nodiscard]] ledger_header& header() const noexcept { return *header_; }
  [[nodiscard]] std::span<client_entry> clients() const noexcept;
  [[nodiscard]] std::span<client_control> controls() const noexcept;
  [[nodiscard]] std::span<std::atomic<std::uint64_t>> chunks() const noexcept { return chunks_; }
  [[nodiscard]] chunk_state chunk(std::uint32_t index) const noexcept {
    return chunk_state::unpack(chunks_[index].load(std::memory_order_acquire));
  }

  [[nodiscard]] mailbox_header& mailbox(std::uint32_t slot) const noexcept;
  /// The ring of releases behind the mailbox's header; its size is a power of two, at least the
  /// number of chunks.
  [[nodiscard]] std::span<std::atomic<std::uint64_t>> mail_ring(std::uint32_t slot) const noexcept;

  /// What the client in `slot` says that chunks hold; see `note_text`.
  [[nodiscard]] std::span<note_text> note_texts(std::uint32_t slot) const noexcept;
  [[nodiscard]] std::span<std::atomic<std::uint16_t>> chunk_notes(
      std::uint32_t slot) const noexcept;
  [[nodiscard]] std::span<std::atomic<std::uint32_t>> promises(std::uint32_t slot) const noexcept;
  [[nodiscard]] std::span<history_entry> history(std::uint32_t slot) const noexcept;

  [[nodiscard]] std::uint32_t writer_slot() const noexcept {
    return static_cast<std::uint32_t>(header().writer.load(std::memory_order_acquire) & 0xffffU);
  }

 private:
  [[nodiscard]] std::byte* mailbox_at(std::uint32_t slot) const noexcept;

  shared_segment ledger_;
  shared_segment mailroom_;
  ledger_header* header_ = nullptr;
  pool_shape shape_;
  std::span<std::atomic<std::uint64_t>> chunks_;
};

/// A run-ahead bound in shared memory is not longer than this, or damaged.
inline constexpr std::chrono::seconds longest_run_ahead{1};

/// What the pool's server wants of the jobs' launches; nothing if there is no server, or if it has not
/// said so.
[[nodiscard]] std::optional<std::chrono::nanoseconds> published_run_ahead(
    ledger_header const& header) noexcept;

/// Nothing of the kind, nor a pause or the announcement of one: of a server that has gone.
void forget_wishes(ledger_header& header) noexcept;

/// A pool's number as it is shown: sixteen hexadecimal digits.
[[nodiscard]] std::string hexadecimal(std::uint64_t pool_id);
/// Names of a pool's shared memory, by which the two belong together in /proc.
[[nodiscard]] std::string ledger_name(std::uint64_t pool_id);
[[nodiscard]] std::string mailroom_name(std::uint64_t pool_id);

/// Creates ledger and mailroom of a new pool, all chunks free, the broker its writer.
[[nodiscard]] pool_files create_ledger(pool_shape const& shape);

/// An eventfd to stop a thread by, close-on-exec. Throws `unavailable` if the process may open no more files.
[[nodiscard]] unique_fd make_event();

/// A second descriptor of a memfd through which it can only be read.
[[nodiscard]] unique_fd reopen_read_only(int fd);
/// The same for reading and writing.
[[nodiscard]] unique_fd reopen_read_write(int fd);

/// CLOCK_MONOTONIC in nanoseconds, the clock of every time in shared memory.
[[nodiscard]] std::int64_t monotonic_ns() noexcept;

}  // namespace sluice::memhandover
