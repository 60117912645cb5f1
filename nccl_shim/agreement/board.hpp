/// Where the processes of a host say whom they wait for, so that sends and receives begin together.
///
/// A process that has come to an *exchange*, a group of sends and receives, names those whose part of it is
/// still to come. Processes that all wait for each other, and for nobody else, are let go at once: those of one
/// exchange as soon as the last of them has come, and those of several whose order would not do otherwise.
///
///   at work ──wait──► waiting ──they wait for each other──► let go ──made──► at work
///                        └───────────take_back────────────────┘ then it is owed
///
/// One word says who is let go, and has a version that grows whenever somebody ceases to wait: so processes are
/// let go only as they were seen. Whom somebody waits for may have done its part since; then it has made progress,
/// and what stands there counts no more. Who waits in a collective is let go by the cut; it stands here for those
/// that wait for it. Modelled in tests/model/exchanges.pml.
///
/// Thread-safety: everything may be called from any thread. Nothing throws or blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace sluice::nccl_shim {

/// More of a runtime folder's take no part: their exchanges are made without asking.
inline constexpr unsigned most_places = 32;

/// In shared memory, zero at first. Whose a place is says the lock of the file's byte with its number: it goes when
/// its process has died, whatever that was called in its container.
struct board_memory {
  struct alignas(64) place {
    /// {progress of those that it waits for, taken together: 30, reason: 2, their places: 32}; its owner's.
    std::atomic<std::uint64_t> waiting;
    std::atomic<std::uint32_t> progress;  ///< grows with its part in what others may wait for
  };
  alignas(64) std::atomic<std::uint64_t> word;  ///< {version: 32, places that are let go: 32}
  std::array<place, most_places> places;
};

/// A process's place on it.
class board {
 public:
  enum class reason : std::uint8_t { none, exchange, collective };

  /// The folder's board, with a place for this process. Nothing if that fails, or all are taken; the reason has
  /// been printed.
  [[nodiscard]] static std::unique_ptr<board> open(std::string const& folder);
  /// A place on a board that lives elsewhere.
  board(board_memory& shared, unsigned place) noexcept : shared_{shared}, place_{place} {}
  board(board const&) = delete;
  board& operator=(board const&) = delete;
  ~board();

  [[nodiscard]] unsigned place() const noexcept { return place_; }

  /// This process has done its part in something: others may wait for it no longer.
  void progressed() noexcept {
    shared_.places[place_].progress.fetch_add(1, std::memory_order_seq_cst);
  }
  /// `who`, a call of this process, waits for the places that `missing` finds, if any. False if not, or if another
  /// call waits; an exchange comes before a collective.
  template <typename Missing>
  bool wait(void const* who, reason why, Missing missing) {
    std::uint32_t const places = missing();
    std::uint32_t const progress = progress_of(places);
    // Found again: so none of them has done its part before the progress was read.
    return places != 0 && missing() == places && show(who, why, places, progress);
  }
  /// Lets go this place and those that it waits for, if they wait for each other. Whether this one is let go.
  [[nodiscard]] bool release() noexcept;
  /// It does not wait any longer. True if it has been let go meanwhile: then it must be made.
  [[nodiscard]] bool take_back(void const* who) noexcept;
  /// What was let go has been made.
  void made(void const* who) noexcept;

 private:
  board(board_memory* owned, unsigned place, int file) noexcept;
  bool show(void const* who, reason why, std::uint32_t places, std::uint32_t progress) noexcept;
  [[nodiscard]] std::uint32_t progress_of(std::uint32_t places) const noexcept;
  [[nodiscard]] std::optional<std::uint32_t> who_wait_for_each_other(
      std::uint64_t word) const noexcept;
  [[nodiscard]] std::uint32_t own_bit() const noexcept { return std::uint32_t{1} << place_; }

  board_memory& shared_;
  std::unique_ptr<board_memory, void (*)(board_memory*)> mapped_{nullptr, nullptr};
  unsigned place_;
  int file_ = -1;              ///< of a place that is this process's as long as it is open
  std::mutex one_;             // of this process's threads
  void const* who_ = nullptr;  // waits; guarded by one_
  reason why_ = reason::none;  // likewise
};

}  // namespace sluice::nccl_shim
