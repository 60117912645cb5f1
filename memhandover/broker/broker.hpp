/// The broker: the socket by which processes find pools, and the loop that keeps them.
///
/// One thread, one poll loop, no libtorch, no CUDA: chunks live by their descriptors alone. There is
/// a pool for each device that somebody needs (detail/pool_set.hpp); what concerns one alone is
/// detail/kept_pool.hpp.
///
/// A new broker adopts live pools: clients that lose their broker start one if need be and offer what
/// they hold.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/wire.hpp"
#include "memhandover/broker/detail/broker_place.hpp"
#include "memhandover/broker/detail/pool_set.hpp"
#include "memhandover/broker/pool_creation.hpp"
#include "memhandover/device/disk_room.hpp"

namespace sluice::memhandover {

class broker {
 public:
  struct options {
    std::string runtime_dir;
    /// Ends, or gives a pool back, this long after the last client has gone.
    std::chrono::milliseconds idle_exit{10'000};
    /// At least so long it waits for the first, who may have started it and takes its time.
    std::chrono::milliseconds first_visit{10'000};
    /// How long to wait for clients of an earlier broker.
    std::chrono::milliseconds adoption_grace{2'000};
    /// How long what a dead server has published stays for its successor; 0: not.
    std::chrono::milliseconds server_grace{10'000};
    std::uint64_t host_copy_bytes = 0;  ///< for what tenants park; 0: none
    disk_wish host_copy_disk{};         ///< beyond that
    pool_wish pools;  ///< the first pool, and what later ones are where a join says nothing else
  };

  /// Makes the first pool, unless there are pools of an earlier broker to adopt. Throws why there
  /// can be none, `already_exists` if another broker serves that folder. Listens when the
  /// constructor returns.
  explicit broker(options how);

  /// Serves until `stop_fd` (a signalfd or eventfd) becomes readable or nobody needs a pool any
  /// more.
  void run(int stop_fd);

 private:
  using clock = std::chrono::steady_clock;

  /// A connection that has not joined: a question, a launcher that wants a pool kept, or a join
  /// under way.
  struct visitor {
    unique_fd socket;
    std::optional<message> deferred;     ///< what waits for a pool
    std::optional<message> adopting;     ///< a rejoin that is delivering the chunks
    std::optional<std::uint64_t> keeps;  ///< the pool that it has opened
    pool_descriptors chunks;
  };

  void accept_visitor();
  void turn_away();
  /// Puts right what others have removed from the folder; false: it is gone, and nobody needs it.
  bool keep_place();
  void serve_visitors(std::vector<bool> const& ready);
  /// Handles one message; false: the connection is done.
  bool serve(visitor& who);
  bool handle(visitor& who, message request);
  bool answer(visitor& who, message& request);
  bool rejoin(visitor& who, message request);
  bool adopt(visitor& who, message request);
  [[nodiscard]] bool kept_by_visitor(detail::kept_pool const& pool) const;
  [[nodiscard]] bool idle() const;
  /// How long it may be idle.
  [[nodiscard]] std::chrono::milliseconds patience() const;

  options options_;
  detail::broker_place place_;
  /// Given up for a visitor who comes when there are no descriptors left, to tell him so.
  unique_fd spare_;
  std::optional<detail::pool_set> pools_;
  std::vector<std::unique_ptr<visitor>> visitors_;
  bool visited_ = false;
  clock::time_point idle_since_{};
};

}  // namespace sluice::memhandover
