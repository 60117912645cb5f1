/// A ring of copies between chunks and host memory, which ends them in the order they were given.
///
///   waiting ──a place is free──► in flight ──its event──► ended (counted by `poll`)
///      └──drop──► forgotten ◄──abandon──┘
///
///   for (std::size_t i = 0; i < chunks.size(); ++i) {
///     copies->out(slots[i], chunks[i], chunk_bytes);
///   }
///   while (copies->in_flight() > 0) {
///     for (auto ended = copies->poll(); ended > 0; --ended) { give(chunks[done++]); }
///     if (late()) { copies->drop(); }
///   }
///
/// Both ends of a copy stay as they are until `poll` has counted it, `drop` or `abandon` has forgotten
/// it, or a call has thrown. On CUDA host memory should be pinned, else a copy waits. It has a stream
/// of its own, and disturbs no capture of another thread.
/// One thread, in which the device's context is current.
///
/// Errors: what the driver says, from any call. By then none of the copies is at work any more, and
/// all that were not counted are forgotten. The ring can be used on.
#pragma once

#include <cstddef>
#include <memory>

namespace sluice::memhandover {

struct cuda_driver;

class chunk_transfer {
 public:
  /// Copies that are in flight at once: enough to keep the link busy while one is given away.
  static constexpr std::size_t window = 8;

  virtual ~chunk_transfer() = default;

  /// Copies a chunk's contents: now, or once those before leave room in the window.
  virtual void out(std::byte* to_host, std::byte const* from_device, std::size_t bytes) = 0;
  virtual void in(std::byte* to_device, std::byte const* from_host, std::size_t bytes) = 0;
  /// How many more copies, the oldest first, have ended since the last call; begins what has waited
  /// for their places. Never waits.
  [[nodiscard]] virtual std::size_t poll() = 0;
  /// Forgets those that have not begun, the last that were given; how many that were.
  virtual std::size_t drop() noexcept = 0;
  /// Waits for those in flight, and forgets all that were not counted.
  virtual void abandon() noexcept = 0;

  /// Begun and not counted.
  [[nodiscard]] virtual std::size_t in_flight() const noexcept = 0;
  [[nodiscard]] virtual std::size_t waiting() const noexcept = 0;
  /// Whether a copy would begin at once.
  [[nodiscard]] bool room() const noexcept { return in_flight() + waiting() < window; }
};

/// `driver`: null for the host backend, where each copy ends at once. Throws `unsupported` where the
/// driver cannot copy.
[[nodiscard]] std::unique_ptr<chunk_transfer> open_chunk_transfer(
    std::shared_ptr<cuda_driver const> driver);

}  // namespace sluice::memhandover
