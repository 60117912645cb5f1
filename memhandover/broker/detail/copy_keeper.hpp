/// The host copies of one broker: memory of the host for what tenants of its CUDA pools park, one table for
/// all of them. The broker never touches the contents.
///
/// Made with the first CUDA pool, whose chunks' size a slot has; pools with chunks of another size get no
/// share. The pages are made present in a thread of its own, in steps, each only where the host has the
/// room for it.
///
/// Thread-safety: none; it belongs to the broker's one thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "memhandover/ledger/host_copy_table.hpp"

namespace sluice::memhandover::detail {

/// What a client is given; the descriptors are the keeper's.
struct copy_share {
  int bytes_fd;
  int table_fd;
  std::uint64_t bytes;
  std::uint64_t slot_bytes;
  std::uint16_t holder;
};

class copy_keeper {
 public:
  /// `budget` bytes; 0: there are none, but those of an earlier broker.
  explicit copy_keeper(std::uint64_t budget) noexcept : budget_(budget) {}
  copy_keeper(copy_keeper const&) = delete;
  copy_keeper& operator=(copy_keeper const&) = delete;
  ~copy_keeper();

  /// Takes over those of an earlier broker, unless there are some already. Throws what is wrong with them.
  void adopt(host_copy_files files);
  /// Makes the copies for a new pool, if it is one of CUDA and there are none. Throws `out_of_memory` for a
  /// budget that the host can never have beside `promised_bytes` of pools, else as `create_host_copies`.
  void make_for(pool_shape const& shape, std::uint64_t promised_bytes);
  /// Gives a pool its place, if it can have one.
  void pool_came(std::uint64_t pool_id, pool_shape const& shape);
  /// Frees all that clients of the pool had, and its place.
  void pool_went(std::uint64_t pool_id);
  /// The same for all pools but these; nobody of the others lives.
  void forget_others(std::span<std::uint64_t const> pool_ids);

  /// Nothing for a pool without a place.
  [[nodiscard]] std::optional<copy_share> share_of(std::uint64_t pool_id, std::uint32_t slot) const;
  /// Frees what a client had that no process acts for any more; returns how many slots.
  std::uint32_t sweep(std::uint64_t pool_id, std::uint32_t slot);

  /// Bytes whose pages are still to be made present.
  [[nodiscard]] std::uint64_t untouched_bytes() const noexcept;
  /// `bytes`, `free_bytes`, `populated_bytes`, and `warning` if the host lacks the room; null for a pool without a place.
  [[nodiscard]] nlohmann::json describe(std::uint64_t pool_id) const;

 private:
  [[nodiscard]] std::optional<std::uint32_t> place_of(std::uint64_t pool_id) const noexcept;
  void clear_place(std::uint32_t place);
  void begin_populating();
  void populate();

  std::uint64_t budget_;
  host_copy_files files_;
  std::optional<host_copy_table> table_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable stopping_;
  bool stop_ = false;
  std::string shortage_;
  std::thread thread_;  ///< logs nothing: a pool's maker is forked beside it
};

}  // namespace sluice::memhandover::detail
