/// What the gate knows of each thread: whether it is inside a gated call, and its exemptions.
///
/// Slots form a list that only grows; a slot whose thread has ended is taken by the next new
/// thread, so that the list is as long as the most threads that lived at once, and the counts of
/// ended threads are kept.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace sluice::gate {

class stream_state;

/// A stream as a call names it, in the context that is current; see `stream_registry`.
struct stream_key {
  void* handle = nullptr;
  /// Only for the default streams, which have one handle in every context.
  void* context = nullptr;
  void const* owner = nullptr;  ///< the thread's slot, only for per-thread default streams
  [[nodiscard]] bool belongs_to_thread() const noexcept { return owner != nullptr; }
  friend bool operator==(stream_key const&, stream_key const&) = default;
};

struct remembered_stream {
  stream_key key;
  stream_state* state = nullptr;
  std::uint64_t epoch = 0;
};

/// What a thread does between the gate and the end of the driver's call.
namespace stay {
inline constexpr std::uint32_t outside = 0;
inline constexpr std::uint32_t launching = 1;
/// Names memory, which must not go meanwhile; what is on the device has nothing to do with it.
inline constexpr std::uint32_t asking = 2;
}  // namespace stay

struct alignas(64) thread_slot {
  /// One of `stay`. Written by the owner; `gate::close` reads it from outside.
  std::atomic<std::uint32_t> inside{stay::outside};
  std::atomic<std::uint32_t> taken{1};     ///< 0 once the owner has ended
  std::atomic<std::uint64_t> launches{0};  ///< written by the owner, read by anyone

  // The rest is the owner's alone.
  bool exempt = false;
  bool protect = false;
  bool expendable = false;        ///< what it launches belongs to the micro-batch …
  std::uint64_t micro_batch = 0;  ///< … of that number
  std::uint32_t commit = 0;       ///< what it launches belongs to that queued commit; 0: to none
  std::uint32_t next_remembered = 0;
  std::array<remembered_stream, 4> remembered{};

  thread_slot* next = nullptr;  ///< constant once the slot is in the list
};

extern thread_local constinit thread_slot* current_slot [[gnu::tls_model("initial-exec")]];

[[nodiscard]] thread_slot& take_slot();

/// The calling thread's slot.
[[nodiscard]] inline thread_slot& this_thread() {
  thread_slot* slot = current_slot;
  return slot != nullptr ? *slot : take_slot();
}

/// The first slot of the list of all, or nullptr.
[[nodiscard]] thread_slot* first_slot() noexcept;

/// Gated calls that went to the driver since the process started.
[[nodiscard]] std::uint64_t all_launches() noexcept;

}  // namespace sluice::gate
