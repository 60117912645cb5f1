/// An executor's end of the conversation with the server that started it.
///
///   executor_session session{unique_fd{socket}};
///   try {
///     if (auto const wanted = session.preparation()) {   // it is a spare
///       // … libraries are loaded …
///       session.prepared();
///     }
///     auto const& orders = session.orders();        // what it is to serve
///     // … a host for that …
///     (void)session.serve(host, {{"device", 0}}, {},   // until the server wants the end
///                         [&](executor_orders const& now) { return change(host, now); });
///     (void)host.stop(0ms);
///   } catch (error const& failure) {
///     session.fail(failure);
///   }
///
///   server → executor   prepare; start, change, infer, cancel, status, ping, keep, announce, end
///   executor → server   prepared; ready or failed; changed, result, status, pong
///
/// A thread of its own receives from the constructor on. While it serves there are two, of which one receives, and computes
/// itself what takes little time; if it does so for longer the other one receives instead (detail/reader_role.hpp).
/// Where the server goes, this process ends at once,
/// without giving memory back: what it had published waits in the pool for a successor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/server/executor/detail/reader_role.hpp"
#include "runtime/server/executor/parcel.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/server/inference/host_board.hpp"
#include "runtime/server/inference/model_executor.hpp"

namespace sluice::server {

/// What a server tells its executor first, and again when it is to serve something else.
struct executor_orders {
  nlohmann::json settings;
  std::string policy;  ///< the text of the server's policy
  /// Models that have ended a process when it read them, as `unservable` of `serve` has them: to be left out.
  nlohmann::json left_out = nlohmann::json::array();
  std::shared_ptr<host_board> board;
  bool is_first = true;  ///< of its server: nobody waits for it yet
};

class executor_session {
 public:
  /// `socket` is connected to the server.
  explicit executor_session(memhandover::unique_fd socket);
  ~executor_session();
  executor_session(executor_session const&) = delete;
  executor_session& operator=(executor_session const&) = delete;
  executor_session(executor_session&&) = delete;
  executor_session& operator=(executor_session&&) = delete;

  /// What this process is to prepare for, as another has said in `serve`, if it is a spare: it has orders when that one
  /// has ended, or never. Waits for what comes first; nothing if these are orders.
  [[nodiscard]] std::optional<nlohmann::json> preparation();
  /// Tells the server that they would be carried out at once.
  void prepared();

  /// Waits for them. Throws `invalid_argument` if what comes is none.
  [[nodiscard]] executor_orders const& orders();
  [[nodiscard]] bool end_wanted() const noexcept { return end_wanted_; }

  /// Gives the server's requests to `host`, and returns when the server wants the end. What `host` has been given
  /// by then it may still answer, as long as the session lives. `spare` is for who may have to take this one's place.
  /// Models that cannot be served are `unservable`, each as {"place", "kind", "error"}. New orders are carried out by `change`,
  /// on this thread and while requests are answered; it returns the same of all models that cannot be served then. What it
  /// throws this throws, when no thread of the session is in the host any more. False if a computation that a thread of the
  /// session makes goes on: then the host must stay.
  using changer = std::function<nlohmann::json(executor_orders const&)>;
  [[nodiscard]] bool serve(model_executor& host,
                           nlohmann::json const& spare = nlohmann::json::object(),
                           nlohmann::json const& unservable = nlohmann::json::array(),
                           changer const& change = {});
  /// Tells the server why there is nothing to serve.
  void fail(error const& why) noexcept;

 private:
  void receive(detail::reader_role::member me);
  /// False at the end of the conversation.
  [[nodiscard]] bool receive_some(detail::reader_role::member me);
  void compute(detail::reader_role::member me);
  void begin_second();
  /// Null where there is none; else it stays until the caller leaves it.
  [[nodiscard]] model_executor* enter_host();
  void leave_host();
  void take(memhandover::message received);
  [[nodiscard]] static executor_orders orders_in(memhandover::message& received);
  void carry_out(std::unique_lock<std::mutex>& lock, changer const& change);
  void infer(memhandover::message received);
  void submit(memhandover::message const& received, request_ticket ticket);
  void cancel(request_ticket which);
  void answer(request_ticket which, infer_result const& result) noexcept;
  void send(parcel const& what);

  memhandover::unique_fd const socket_;
  std::mutex sending_;  ///< a message at a time
  std::atomic<bool> end_wanted_ = false, closing_ = false;

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  std::optional<nlohmann::json> preparation_;
  std::optional<executor_orders> orders_;
  std::optional<error> refused_orders_;
  std::optional<executor_orders> next_orders_;  ///< which have not been carried out
  std::uint64_t next_number_ = 0;               ///< their name
  model_executor* host_ = nullptr;              ///< called with the mutex
  std::set<request_ticket> being_read_;  ///< requests with large bodies, until they are the host's

  std::size_t in_host_ = 0;  ///< threads that receive

  detail::reader_role role_;
  background_thread bodies_;  ///< reads large ones, so that small requests do not wait for them
  std::thread receiver_, second_;
};

}  // namespace sluice::server
