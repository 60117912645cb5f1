/// The host copies of one broker: memory of the host, and a file on a disk beyond that, for what tenants of its pools park, one
/// table for all of them. The broker never touches the contents.
///
/// Made with the first pool, whose chunks' size a slot has; pools with chunks of another size get no
/// share. The pages are made present in a thread of its own, in steps, each only where the host has the
/// room for it. Where there can be none, the pools are kept all the same, and what is said of them tells why.
///
/// Every client can write to the table. So its shape is read once, and which pool has which place of it is kept here
/// too; what stands there is for the next broker.
///
/// Thread-safety: none; it belongs to the broker's one thread.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "memhandover/device/disk_room.hpp"
#include "memhandover/device/host_room.hpp"
#include "memhandover/ledger/host_copy_table.hpp"

namespace sluice::memhandover::detail {

/// What a client is given; the descriptors are the keeper's.
struct copy_share {
  int bytes_fd;
  int table_fd;
  int disk_fd;  ///< -1 where all are in memory
  std::uint64_t bytes;
  std::uint64_t disk_bytes;
  std::uint64_t slot_bytes;
  std::uint16_t holder;
};

/// Ids of pools by their place in a table; 0: nobody's.
using places_of_pools = std::array<std::uint64_t, host_copy_pools>;

class copy_keeper {
 public:
  struct options {
    std::uint64_t budget = 0;  ///< bytes; 0: there are none, but those of an earlier broker
    disk_wish disk{};          ///< beside those
    /// Whether a process may still act for the client in that slot of a pool, be it one of an earlier broker.
    std::function<bool(std::uint64_t pool_id, std::uint32_t slot)> lives;
    std::function<host_room()> room = [] { return read_host_room(); };  ///< from any thread
  };

  explicit copy_keeper(options how) : options_(std::move(how)) {}
  copy_keeper(copy_keeper const&) = delete;
  copy_keeper& operator=(copy_keeper const&) = delete;
  ~copy_keeper();

  /// Makes the copies for a new pool, if there are none. Throws `out_of_memory` for a
  /// budget that the host can never have beside `pool_bytes` of it for pools, `invalid_argument` for one of less than a
  /// chunk; and of a disk why it cannot be had. What fails otherwise is logged and told by `describe`.
  void make_for(pool_shape const& shape, std::uint64_t pool_bytes);
  /// Takes over those that a client of a pool that is here brings from an earlier broker, and that it has as `holder`.
  /// Throws what is wrong with them, or that they are not those which are kept.
  void adopt(host_copy_files files, std::uint64_t pool_id, std::uint32_t slot,
             std::uint32_t holder);
  /// Gives a pool its place, if it can have one.
  void pool_came(std::uint64_t pool_id, pool_shape const& shape);
  /// Frees all that clients of the pool had, and its place.
  void pool_went(std::uint64_t pool_id);
  /// There are places of pools that are not here: their users may still come.
  [[nodiscard]] bool awaits_pools() const noexcept;
  /// Frees what no process acts for any more, and places of pools that nobody can come back to.
  void tidy();

  /// Nothing for a pool without a place.
  [[nodiscard]] std::optional<copy_share> share_of(std::uint64_t pool_id, std::uint32_t slot) const;
  /// Frees what a client had that no process acts for any more; returns how many slots.
  std::uint32_t sweep(std::uint64_t pool_id, std::uint32_t slot);

  /// Bytes whose pages are not present yet.
  [[nodiscard]] std::uint64_t untouched_bytes() const noexcept;
  /// `bytes`, how many of them are free, held, kept or damaged, `populated_bytes`, `disk`, null or the same of that, and
  /// `warning` if less can be had than was asked for; null where nobody has asked for any.
  [[nodiscard]] nlohmann::json describe(std::uint64_t pool_id);

 private:
  struct known_pool {
    std::uint64_t id;
    std::string name;
    std::uint64_t chunk_bytes;
    std::string without;  ///< why it has none; empty if it has
  };

  [[nodiscard]] std::optional<std::uint32_t> place_of(std::uint64_t pool_id) const noexcept;
  [[nodiscard]] bool is_here(std::uint64_t pool_id) const noexcept;
  [[nodiscard]] bool any_lives(std::uint64_t pool_id) const;
  void use(host_copy_files files, host_copy_table table);
  void give_place(known_pool& pool);
  void set_place(std::uint32_t place, std::uint64_t pool_id);
  void note_damage(copy_counts const& counted);
  void begin_populating();
  void populate();
  [[nodiscard]] std::string shortage() const;

  options options_;
  host_copy_files files_;
  std::optional<host_copy_table> table_;
  places_of_pools places_{};
  std::vector<known_pool> pools_;  ///< those that are here
  std::string failure_;            ///< why there is no table
  bool damage_noted_ = false;
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable stopping_;
  bool stop_ = false;
  std::string shortage_;
  std::thread thread_;  ///< logs nothing: a pool's maker is forked beside it
};

}  // namespace sluice::memhandover::detail
