/// Who writes a pool's ledger: its server once it is ready, otherwise the broker.
///
///   broker ──a server is ready, all that its predecessor held is taken back──► server
///     ▲                                                                          │
///     └─────────────────────────────its process exits────────────────────────────┘
///
/// A server joins, opens the pool's memory, and says `ready`; only then is it appointed. Until it is,
/// it has no part in anything: one that dies or hangs while it starts holds nobody up. Its `rejoin`
/// says again whether it is ready, and is answered again that it is the writer if it is.
///
/// Thread-safety: none; it belongs to the broker's one thread. No call waits.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "memhandover/broker/detail/kept_client.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/ledger_writer.hpp"

namespace sluice::memhandover::detail {

using kept_clients = std::array<kept_client, max_clients>;

class succession {
 public:
  /// Nothing changes until `broker_takes_over`. Both outlive this object.
  succession(ledger_view const& view, kept_clients& clients);

  /// The broker's own writer; null while a server writes.
  [[nodiscard]] ledger_writer* writer() const noexcept { return writer_.get(); }
  /// The live server, whether it writes yet or not.
  [[nodiscard]] std::optional<std::uint32_t> server_slot() const;

  /// The broker writes from now on; what the last writer had demanded is nobody's wish any more.
  void broker_takes_over();
  /// The server in `slot` can write.
  void hear_ready(std::uint32_t slot);
  /// Appoints the server if there is one whose turn it is.
  void appoint_ready_server();
  /// A client has a connection, its first or, with what it says of its readiness, another one.
  void client_came(std::uint32_t slot, unique_fd writers_bell);
  void client_came_back(std::uint32_t slot, unique_fd writers_bell, bool ready);
  /// Asks the server that writes to take back what a dead client held.
  void report_gone(std::uint32_t slot);

 private:
  [[nodiscard]] bool dead_server_holds() const;
  void name_writer(std::uint32_t slot);
  void announce_appointed(std::uint32_t slot);
  void send_to_server(nlohmann::json const& body, std::vector<int> const& descriptors = {});

  ledger_view const& view_;
  kept_clients& clients_;
  std::unique_ptr<ledger_writer> writer_;
};

}  // namespace sluice::memhandover::detail
