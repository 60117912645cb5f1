/// The broker: keeps the descriptors of one pool, hands them out, and takes back what the dead
/// held.
///
/// One thread, one poll loop, no libtorch, no CUDA: chunks live by their descriptors alone. While
/// there is no inference server it is also the ledger's writer.
///
/// Life of a client's slot:
///
///   empty ──join──► live ──process exits──► gone
///     ▲                                       │
///     └── reclaimed ◄──last holder of its life pipe exits
///
/// A *life pipe* is made by the client, which sends the read end and keeps the write end open;
/// forked descendants inherit it with everything else that reaches the pool, so its hang-up is the
/// exit of the last of them. Descendants left behind by a dead client are ended.
///
/// A new broker adopts a live pool: clients that lose their broker start one if need be and offer
/// what they hold.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/ledger.hpp"
#include "memhandover/ledger_writer.hpp"
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

  struct client {
    bool present = false;
    bool reported = false;  ///< the server has been asked to take back what it held
    int pid = 0;
    unique_fd socket;
    unique_fd process;  ///< pidfd
    unique_fd
        life;  ///< read end of its life pipe; empty if it died before telling an adopting broker
    unique_fd bell;
    clock::time_point look_at{};  ///< when its descendants are looked for again
    std::chrono::milliseconds look_every{5};
    /// Its process is gone, what it held is not taken back yet.
    [[nodiscard]] bool orphaned() const noexcept { return present && !process && !reported; }
    /// Its life pipe is known to have no holder left, which is much cheaper to see than to look
    /// through all processes for one.
    [[nodiscard]] bool alone() const;
    /// Ends the descendants that hold its life pipe; returns how many were found. It takes
    /// milliseconds, and the pipe tells of the last one's exit: so the next look is due later and
    /// later.
    int end_descendants(std::uint64_t pipe_inode);
  };
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
  void adopt_clients();
  void accept_visitor();
  /// Handles one message; false: the connection is done.
  bool serve(visitor& who);
  bool handle(visitor& who, message request);
  void join(visitor& who, message request);
  bool rejoin(visitor& who, message request);
  void seat(visitor& who, message& request, std::uint32_t slot);
  void appoint_server(std::uint32_t slot);
  void report_to_server(std::uint32_t slot);
  void become_writer();
  void read_client(std::uint32_t slot);
  void client_exited(std::uint32_t slot);
  void finish(std::uint32_t slot);
  void clear_slot(std::uint32_t slot);
  void write_roster() const;
  [[nodiscard]] bool roster_lives() const;
  [[nodiscard]] nlohmann::json status() const;
  [[nodiscard]] std::optional<std::uint32_t> server_slot() const;
  void tell_server(nlohmann::json const& body, std::vector<int> const& descriptors = {});

  options options_;
  std::function<pool_files()> make_pool_;
  unique_fd socket_lock_;
  unique_fd listener_;
  pool_files files_;
  std::unique_ptr<ledger_view> view_;
  std::unique_ptr<ledger_writer> writer_;  ///< set while the broker is the writer
  std::array<client, max_clients> clients_;
  std::vector<std::unique_ptr<visitor>> visitors_;
  clock::time_point adopt_until_{};
  clock::time_point idle_since_{};
};

}  // namespace sluice::memhandover
