/// One pool as the broker keeps it: its descriptors and ledger, who uses it, and the taking back of
/// what the dead held. Who writes the ledger is detail/succession.hpp.
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
/// Thread-safety: none; it belongs to the broker's one thread. No call waits.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "memhandover/base/poll_list.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/detail/copy_keeper.hpp"
#include "memhandover/broker/detail/succession.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/manifest.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover::detail {

class kept_pool {
 public:
  /// Takes over who is in the ledger: nobody in a new pool, the clients of an earlier broker in an
  /// adopted one. `users_changed` is called when `users` says something else than before. Throws
  /// `internal` if the ledger cannot be read.
  /// `server_grace`: how long what a dead server has published stays for its successor.
  /// `copies` outlives the pool, and has given it its place.
  kept_pool(pool_files files, copy_keeper& copies, std::chrono::milliseconds server_grace,
            std::function<void()> users_changed);

  [[nodiscard]] ledger_view const& view() const noexcept { return view_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return view_.header().pool_id; }
  /// Bytes of the host's memory that the pool may still come to use.
  [[nodiscard]] std::uint64_t untouched_host_bytes() const noexcept;
  /// There is a client, or what a dead one held has not been taken back, or waits for its successor.
  [[nodiscard]] bool in_use() const noexcept;
  /// A client has that place, though its process may have ended; what it held has not been taken back.
  [[nodiscard]] bool has_client(std::uint32_t slot) const noexcept {
    return clients_[slot].present;
  }
  /// When to `serve` even if nothing has become ready.
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> wake_at() const;
  /// The processes that use the pool: `pid` and `start`, their start time in clock ticks.
  [[nodiscard]] nlohmann::json users() const;

  /// Seats who sent `request` over `socket`, and takes the socket; throws why not, and then it has not.
  void join(unique_fd& socket, message request);
  /// Seats a client again that had this place under an earlier broker. Throws `not_found` if it had
  /// none here.
  void rejoin(unique_fd& socket, message request);

  /// As `order_park` and `order_wake`; the job is told.
  void park(nlohmann::json const& question);
  void wake(nlohmann::json const& question);
  /// As `mark_use`.
  void note_use(nlohmann::json const& question);

  /// Adds what this pool waits for; `serve` then handles what became ready.
  void watch(poll_list& polled);
  void serve(poll_list const& polled);

 private:
  struct places {
    std::size_t socket, process, life;
  };

  void adopt_clients();
  void refuse_second_server() const;
  void seat(std::uint32_t slot, unique_fd& socket, kept_client record, client_traits const& kind,
            message const& request, job_standing const& standing);
  void ring(std::uint32_t slot) const noexcept;
  void become_writer();
  void read_client(std::uint32_t slot);
  void client_exited(std::uint32_t slot);
  void look_for(std::uint32_t slot);
  void finish(std::uint32_t slot);
  [[nodiscard]] std::optional<std::string> refusal_of_copies(message& request, std::uint32_t slot);
  void take_back(std::uint32_t slot);
  void free_copies(std::uint32_t slot);
  void end_grace();
  void clear_slot(std::uint32_t slot);

  pool_files files_;
  ledger_view view_;
  manifest manifest_;
  copy_keeper& copies_;
  std::chrono::milliseconds server_grace_;
  std::function<void()> users_changed_;
  kept_clients clients_;
  succession succession_;
  std::size_t doorbell_at_ = 0;
  std::array<places, max_clients> client_at_{};
};

}  // namespace sluice::memhandover::detail
