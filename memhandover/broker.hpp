/// The broker: the socket by which processes find the pool, and the loop that keeps it.
///
/// One thread, one poll loop, no libtorch, no CUDA: chunks live by their descriptors alone. What
/// concerns the pool itself is detail/kept_pool.hpp.
///
/// A new broker adopts a live pool: clients that lose their broker start one if need be and offer
/// what they hold.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/detail/kept_pool.hpp"
#include "memhandover/ledger.hpp"
#include "memhandover/wire.hpp"

namespace sluice::memhandover {

class broker {
 public:
  struct options {
    std::string runtime_dir;
    std::chrono::milliseconds idle_exit{10'000};  ///< ends this long after the last client has gone
    std::chrono::milliseconds adoption_grace{
        2'000};  ///< how long to wait for clients of an earlier broker
  };

  /// `make_pool` creates a new pool if there is none to adopt; it may throw, and then so does the
  /// constructor, or `run` if an adoption was expected first. Listens when the constructor returns.
  broker(options how, std::function<pool_files()> make_pool);

  /// Serves until `stop_fd` (a signalfd or eventfd) becomes readable or nobody needs the pool any
  /// more.
  void run(int stop_fd);

 private:
  using clock = std::chrono::steady_clock;

  /// A connection that has not joined: a status query, a launcher that wants the pool kept, or a
  /// join under way.
  struct visitor {
    unique_fd socket;
    std::optional<message> deferred;  ///< a join that waits for the pool
    std::optional<message> adopting;  ///< a rejoin that is delivering the chunks
    pool_descriptors chunks;
  };

  void listen();
  void open_pool(pool_files files);
  void accept_visitor();
  void serve_visitors(std::vector<bool> const& ready);
  /// Handles one message; false: the connection is done.
  bool serve(visitor& who);
  bool handle(visitor& who, message request);
  bool rejoin(visitor& who, message request);
  bool adopt(visitor& who, message request);
  [[nodiscard]] bool idle() const;
  [[nodiscard]] std::optional<clock::time_point> wake_at() const;
  void write_roster() const;
  [[nodiscard]] bool roster_lives() const;

  options options_;
  std::function<pool_files()> make_pool_;
  unique_fd socket_lock_;
  unique_fd listener_;
  std::unique_ptr<detail::kept_pool> pool_;  ///< empty while an earlier broker's is waited for
  std::vector<std::unique_ptr<visitor>> visitors_;
  clock::time_point adopt_until_{};
  clock::time_point idle_since_{};
};

}  // namespace sluice::memhandover
