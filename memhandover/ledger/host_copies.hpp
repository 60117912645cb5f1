/// The table of host copies: which slots of the host's memory hold contents of a tenant's chunks.
///
/// One word a slot, in shared memory that every tenant of a CUDA pool maps beside the bytes. The table
/// belongs to nobody: every change is one compare-and-swap of one word, so that whoever dies between two
/// leaves slots of a dead holder, which the broker sweeps.
///
///   free ──hold──► held ──keep──► kept ──hold_again──► held       by its holder
///   held or kept ──give_back──► free                                 by its holder
///   kept ──steal──► held by another                               by anybody; the holder's next
///                                                                 `hold_again` fails
///   held or kept of a dead holder ──sweep──► free                 by the broker
///
/// The first slots are in memory, those behind them on a disk, if there is one; who needs one finds those in memory first.
///
/// Every change of hands counts the word's generation up, so that a holder whose copy was stolen and
/// came free again does not take it for its own.
///
///   host_copies copies{words};
///   auto mine = copies.hold(3, holder);      // three slots, or none
///   // … the contents are copied there, and back …
///   copies.give_back(mine.front());
///
/// Thread-safety: all functions from any thread of any process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/ledger/layout.hpp"

namespace sluice::memhandover {

inline constexpr std::uint64_t host_copies_magic = 0x3143504f43494c53;  // "SLICOPC1"
inline constexpr std::uint32_t host_copies_version = 2;
/// Pools whose tenants may have slots at the same time.
inline constexpr std::uint32_t host_copy_pools = 64;
inline constexpr std::uint64_t max_host_copy_slots = 1ULL << 24U;

/// Before the words. All but `populated` and `pools` is constant once the table has been made; who opens a table reads
/// it once, since every client can write here.
struct alignas(64) host_copies_header {
  std::atomic<std::uint64_t> magic;
  std::atomic<std::uint32_t> version;
  std::atomic<std::uint32_t> slots;       ///< all
  std::atomic<std::uint32_t> disk_slots;  ///< of these, the last
  std::atomic<std::uint64_t> slot_bytes;
  /// Bytes, in memory and on disk; what a last part of a slot would take is not used.
  std::atomic<std::uint64_t> budget;
  std::atomic<std::uint64_t> disk_budget;
  std::atomic<std::uint64_t> populated;               ///< bytes whose pages are there
  std::atomic<std::uint64_t> pools[host_copy_pools];  ///< their ids, 0: nobody's place
};

/// What a table is for as long as somebody uses it, whatever is written to its header later.
struct host_copies_shape {
  std::uint32_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint32_t disk_slots = 0;  ///< the last of them

  [[nodiscard]] std::uint32_t memory_slots() const noexcept { return slots - disk_slots; }
  /// Of all slots in memory.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return memory_slots() * slot_bytes; }
  [[nodiscard]] std::uint64_t disk_bytes() const noexcept { return disk_slots * slot_bytes; }
  [[nodiscard]] bool is_on_disk(std::uint32_t slot) const noexcept {
    return slot >= memory_slots();
  }
  bool operator==(host_copies_shape const&) const = default;
};

enum class copy_state : std::uint8_t { free = 0, held = 1, kept = 2 };

/// Who has slots: a client's slot in one of the pools.
[[nodiscard]] constexpr std::uint16_t copy_holder(std::uint32_t pool_place, std::uint32_t slot) {
  return static_cast<std::uint16_t>(pool_place * max_clients + slot);
}
inline constexpr std::uint32_t copy_holders = host_copy_pools * max_clients;
/// Its place of a pool.
[[nodiscard]] constexpr std::uint32_t pool_place_of(std::uint16_t holder) {
  return holder / max_clients;
}
/// Its client's slot there.
[[nodiscard]] constexpr std::uint32_t client_slot_of(std::uint16_t holder) {
  return holder % max_clients;
}

/// A slot's word.
struct copy_word {
  copy_state state = copy_state::free;
  std::uint16_t holder = 0;      ///< 0 where it is free
  std::uint64_t generation = 0;  ///< 40 bits; counted up by every change of hands

  [[nodiscard]] std::uint64_t pack() const noexcept;
  /// Nothing for a word that no writer of the table leaves.
  [[nodiscard]] static std::optional<copy_word> unpack(std::uint64_t word) noexcept;
  bool operator==(copy_word const&) const = default;
};

/// A slot as its holder has it.
struct held_copy {
  std::uint32_t slot = 0;
  std::uint16_t holder = 0;
  std::uint64_t generation = 0;
};

/// Where a slot is.
enum class copy_place : std::uint8_t { memory, disk };

struct copy_counts {
  std::uint32_t free = 0;
  std::uint32_t held = 0;
  std::uint32_t kept = 0;
  std::uint32_t damaged = 0;
};

class host_copies {
 public:
  /// `words` must outlive this object; the last `disk_slots` are of a disk.
  explicit host_copies(std::span<std::atomic<std::uint64_t>> words,
                       std::uint32_t disk_slots = 0) noexcept
      : words_(words), disk_slots_(disk_slots) {}

  [[nodiscard]] std::uint32_t slots() const noexcept {
    return static_cast<std::uint32_t>(words_.size());
  }
  /// Throws `internal` that names the slot if its word is damaged, `invalid_argument` for one that there is not.
  [[nodiscard]] copy_word at(std::uint32_t slot) const;
  /// Each word is read once; those of several slots change meanwhile. Damaged ones are nobody's.
  [[nodiscard]] copy_counts count(std::optional<copy_place> only = {}) const noexcept;

  /// `count` free slots for `holder`, or none if there are too few. Throws `invalid_argument` for a
  /// holder that there is not. What is free but damaged is not used.
  std::vector<held_copy> hold(std::uint32_t count, std::uint16_t holder,
                              std::optional<copy_place> only = {});
  /// held → kept: the contents stay, and who needs the slot may take it. False: it is not held so.
  bool keep(held_copy const& mine);
  /// kept → held. False: it has been stolen meanwhile.
  [[nodiscard]] bool hold_again(held_copy const& mine);
  /// Gives a slot back, held or kept. False: it is not this holder's any more.
  bool give_back(held_copy const& mine);
  /// Takes up to `count` kept slots of others. Throws as `hold`.
  [[nodiscard]] std::vector<held_copy> steal(std::uint32_t count, std::uint16_t thief,
                                             std::optional<copy_place> only = {});
  /// Frees all that dead holders had; returns how many. No process may act for them any more.
  std::uint32_t sweep(std::function<bool(std::uint16_t holder)> const& is_dead);

 private:
  /// First slot, and the one behind the last.
  struct range {
    std::uint32_t first;
    std::uint32_t end;
  };
  [[nodiscard]] range range_of(std::optional<copy_place> only) const noexcept;
  [[nodiscard]] std::atomic<std::uint64_t>& word(std::uint32_t slot) const;
  bool change(held_copy const& mine, copy_state from, copy_state to);

  std::span<std::atomic<std::uint64_t>> words_;
  std::uint32_t disk_slots_;
};

/// Bytes of a table of so many slots.
[[nodiscard]] std::size_t host_copies_table_bytes(std::uint32_t slots) noexcept;

/// How many slots a budget makes. Throws `invalid_argument` for one that is smaller than a slot, or has
/// more than a table can.
[[nodiscard]] std::uint32_t host_copy_slots(std::uint64_t budget, std::uint64_t slot_bytes);

/// The same of a budget on disk, where 0 is none.
[[nodiscard]] std::uint32_t disk_copy_slots(std::uint64_t disk_budget, std::uint64_t slot_bytes);

/// Writes the header of a new table; `memory` is zero, which is a free slot's word.
void make_host_copies(std::span<std::byte> memory, std::uint64_t budget, std::uint64_t slot_bytes,
                      std::uint64_t disk_budget = 0);

/// The header at the beginning of `memory`. Throws `internal` if that is shorter.
[[nodiscard]] host_copies_header& host_copies_header_in(std::span<std::byte> memory);
/// What the table in `memory` is, all of which belongs to it. Throws `internal` that names what is wrong with it.
[[nodiscard]] host_copies_shape host_copies_shape_in(std::span<std::byte> memory);
/// The words of a table of that shape, which `memory` is long enough for.
[[nodiscard]] std::span<std::atomic<std::uint64_t>> host_copies_words(
    std::span<std::byte> memory, host_copies_shape const& shape) noexcept;

}  // namespace sluice::memhandover
