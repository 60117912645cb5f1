/// A pool whose shared memory is damaged at random, and set right again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::trials {

/// What a pool is used for when it is damaged.
enum class pool_use { unused, training, serving, engines, crowded };

class damaged_pool {
 public:
  damaged_pool(std::uint32_t chunk_count, pool_use use);

  /// Changes up to eight places; what was damaged before is whole again. Now and then nothing
  /// changes, or the segments get other sizes.
  void damage(std::mt19937_64& random);

  [[nodiscard]] int ledger_fd() const noexcept;
  [[nodiscard]] int mailroom_fd() const noexcept;
  /// Whether what opening looks at is undamaged, so that who has the pool open may go on.
  [[nodiscard]] bool opens_as_before() const;
  /// A word that the refusal to open the pool must name, found from the bytes alone; nothing if the
  /// pool must open.
  [[nodiscard]] std::optional<std::string> refusal() const;

 private:
  struct segment {
    shared_segment map;
    std::vector<std::byte> whole;
    std::vector<std::size_t> damaged;  ///< offsets of the eight bytes that are to be set right
    unique_fd resized;                 ///< a copy of another size

    void restore();
    void set_word(std::size_t at, std::uint64_t value);
    [[nodiscard]] std::uint64_t word(std::size_t at) const;
  };

  void damage_place(std::mt19937_64& random);
  void damage_header(std::mt19937_64& random);
  void damage_ledger(std::mt19937_64& random);
  void damage_mailbox(std::mt19937_64& random);
  void damage_size(std::mt19937_64& random);
  void damage_text(segment& where, std::size_t at, std::size_t bytes, std::mt19937_64& random);
  [[nodiscard]] std::size_t ledger_offset(void const* in_twin) const;
  [[nodiscard]] std::size_t mailroom_offset(void const* in_twin) const;

  pool_files files_;
  pool_files twin_files_;
  ledger_view twin_;  ///< never damaged: tells where what lies
  segment ledger_;
  segment mailroom_;
  std::optional<std::size_t> ledger_bytes_;  ///< set while `resized` stands for the segment
  std::optional<std::size_t> mailroom_bytes_;
};

}  // namespace sluice::memhandover::trials
