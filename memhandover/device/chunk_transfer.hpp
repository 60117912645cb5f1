/// A ring of copies between chunks and host memory, which ends them in the order they were begun.
///
///   free place ──out, in──► in flight ──its event──► done (counted by `poll`) ──► free place
///
///   while (next < chunks.size() || copies->in_flight() > 0) {
///     while (next < chunks.size() && copies->room()) {
///       copies->out(slots[next], chunks[next], chunk_bytes);
///       ++next;
///     }
///     for (auto ended = copies->poll(); ended > 0; --ended) { give(chunks[done++]); }
///   }
///
/// Both ends of a copy stay as they are until `poll` has counted it. On CUDA host memory should be
/// pinned, else a copy waits. One thread, in which the device's context is current. Errors: what the
/// driver says; then nothing new is in flight, and `wait` proves that of what was.
#pragma once

#include <cstddef>
#include <memory>

namespace sluice::memhandover {

struct cuda_driver;

class chunk_transfer {
 public:
  /// Copies that may be in flight at once: enough to keep the link busy while one is given away.
  static constexpr std::size_t window = 8;

  virtual ~chunk_transfer() = default;

  /// Begins a copy of a chunk's contents. Throws `invalid_argument` if there is no room.
  virtual void out(std::byte* to_host, std::byte const* from_device, std::size_t bytes) = 0;
  virtual void in(std::byte* to_device, std::byte const* from_host, std::size_t bytes) = 0;
  /// How many more copies, the oldest first, have ended since the last call. Never waits.
  [[nodiscard]] virtual std::size_t poll() = 0;
  /// Waits for all that are in flight; `poll` still counts them.
  virtual void wait() = 0;

  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;
  [[nodiscard]] bool room() const noexcept { return in_flight() < window; }
};

/// `driver`: null for the host backend, where each copy ends at once.
[[nodiscard]] std::unique_ptr<chunk_transfer> open_chunk_transfer(
    std::shared_ptr<cuda_driver const> driver);

}  // namespace sluice::memhandover
