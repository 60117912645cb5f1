/// What the ranks of a communicator share for their cut, wherever it lies: the word, how far each has come,
/// and what it means by its numbers.
///
///   on one host       `words_in_memory`   shared memory; who waits sleeps until it is told
///   on several hosts  `words_in_store`    a store that all reach over the network; who waits asks again
///
/// All ranks see all that happens here in one order, and what one has written before it looks is seen by who
/// looks later: sequential consistency, whatever lies behind it.
///
/// Thread-safety: an object is one rank's; its functions may be called from any thread, `arrive` from one.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>

namespace sluice::nccl_shim {

inline constexpr unsigned max_ranks = 64;

/// The word.
struct cut_word {
  std::uint16_t epoch = 0;  ///< of 9 bits: it is only asked whether it is another one
  /// The first that needs it has not granted what others have launched yet.
  bool catching_up = false;
  std::uint8_t needed = 0;    ///< ranks that need it
  std::uint8_t pausing = 0;   ///< ranks that pause
  std::uint64_t granted = 0;  ///< less than 2⁴⁰: a million collectives a second for twelve days

  static constexpr std::uint64_t one_pausing = std::uint64_t{1} << 40U;

  constexpr void next_epoch() noexcept {
    epoch = static_cast<std::uint16_t>((epoch + 1U) & 0x1ffU);
  }
  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return std::uint64_t{epoch} << 55U | std::uint64_t{catching_up} << 54U |
           std::uint64_t{needed} << 47U | std::uint64_t{pausing} << 40U | granted;
  }
  [[nodiscard]] static constexpr cut_word unpack(std::uint64_t word) noexcept {
    return {static_cast<std::uint16_t>(word >> 55U), (word >> 54U & 1U) != 0,
            static_cast<std::uint8_t>(word >> 47U & 0x7fU),
            static_cast<std::uint8_t>(word >> 40U & 0x7fU), word & (one_pausing - 1)};
  }
  bool operator==(cut_word const&) const = default;
};

/// What a number stands for; all ranks must mean the same.
struct numbered_call {
  std::uint64_t operation = 0;  ///< which function, and of a group how many calls
  std::uint64_t type = 0;       ///< of the elements
  std::uint64_t count = 0;      ///< of the elements; of a group a hash of its calls
  std::uint64_t root = 0;       ///< or the reduction

  bool operator==(numbered_call const&) const = default;
};

inline constexpr std::uint64_t remembered_calls = 32;

/// What a rank has come to: all before that number is with its device, in that epoch.
inline constexpr unsigned number_bits = 48;
inline constexpr std::uint64_t number_mask = (std::uint64_t{1} << number_bits) - 1;
[[nodiscard]] constexpr std::uint64_t arrival(std::uint16_t epoch, std::uint64_t number) noexcept {
  return std::uint64_t{epoch} << number_bits | number;
}

/// Whether a rank that has come to `at` remembers what it meant by `number`, and does not write it anew.
[[nodiscard]] constexpr bool is_remembered(std::uint64_t at, std::uint64_t number) noexcept {
  std::uint64_t const newest = at & number_mask;
  return newest >= number && newest + 1 < number + remembered_calls;
}

/// In the place of a rank that is lost: what all share is, and with it everybody.
inline constexpr unsigned the_words = 0xffff;

struct cut_memory;

class cut_words {
 public:
  struct view {
    std::uint64_t word;
    std::uint32_t lost;    ///< 1 + a rank that is lost
    std::uint64_t differ;  ///< {1 + number: 48, rank: 8, rank: 8} whose calls differ
  };
  enum class sight : std::uint8_t { all_alike, somebody_missing, differ };
  struct glance {
    sight what;
    std::array<unsigned, 2> ranks;  ///< that differ
  };

  cut_words() = default;
  cut_words(cut_words const&) = delete;
  cut_words& operator=(cut_words const&) = delete;
  virtual ~cut_words() = default;

  /// Where they lie, for whoever has no time for a detour; nullptr if that is not memory.
  [[nodiscard]] virtual cut_memory* memory() noexcept { return nullptr; }

  [[nodiscard]] virtual view look() noexcept = 0;
  /// Makes the word `made` if it is `seen`; else `seen` becomes what it is. May fail as if it were not.
  [[nodiscard]] virtual bool exchange(std::uint64_t& seen, std::uint64_t made) noexcept = 0;

  /// This rank has come to an arrival, and means that by its number.
  virtual void arrive(std::uint64_t at, numbered_call const& what) noexcept = 0;
  /// Where each of so many ranks has arrived.
  virtual void arrivals(std::span<std::uint64_t> of_ranks) noexcept = 0;
  [[nodiscard]] virtual numbered_call call_of(unsigned rank, std::uint64_t number) noexcept = 0;
  /// Whether all ranks have come to that arrival, and mean the same by it.
  [[nodiscard]] virtual glance look_at_all(std::uint64_t at) noexcept = 0;
  /// Whether a rank that is as far as this one, or farther, and remembers, means another call by this one's
  /// number.
  [[nodiscard]] virtual bool differs(unsigned neighbour, std::uint64_t number) noexcept = 0;

  /// How far this rank has launched.
  virtual void launched(std::uint64_t number) noexcept = 0;
  [[nodiscard]] virtual std::uint64_t launched() noexcept = 0;

  /// The first that is said stays.
  virtual void lose(unsigned rank) noexcept = 0;
  virtual void differ(std::uint64_t differ) noexcept = 0;

  /// Grows with what somebody may wait for.
  [[nodiscard]] virtual std::uint32_t turn() noexcept = 0;
  virtual void notify() noexcept = 0;
  /// Waits a moment, or until the turn is not `seen` any more, where that can be told.
  virtual void wait(std::uint32_t seen, std::chrono::nanoseconds waited,
                    std::chrono::nanoseconds at_most) noexcept = 0;
  /// How long whoever has waited so long, and does not call `wait`, should leave it alone.
  [[nodiscard]] virtual std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept = 0;
};

}  // namespace sluice::nccl_shim
