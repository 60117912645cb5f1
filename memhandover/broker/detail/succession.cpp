#include "memhandover/broker/detail/succession.hpp"

#include <spdlog/spdlog.h>

#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover::detail {

succession::succession(ledger_view const& view, kept_clients& clients)
    : view_(view), clients_(clients) {}

std::optional<std::uint32_t> succession::server_slot() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).lives() && is_server(view_.clients()[slot])) {
      return slot;
    }
  }
  return std::nullopt;
}

bool succession::dead_server_holds() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients_.at(slot).orphaned() && is_server(view_.clients()[slot])) {
      return true;
    }
  }
  return false;
}

void succession::name_writer(std::uint32_t slot) {
  auto const generation = (view_.header().writer.load() >> 16U) + 1;
  view_.header().writer.store(generation << 16U | slot, std::memory_order_release);
}

void succession::broker_takes_over() {
  name_writer(broker_slot);
  view_.header().serving_now.store(0);
  forget_wishes(view_.header());
  writer_ = std::make_unique<ledger_writer>(view_);
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto& record = clients_.at(slot);
    if (!record.bell) {
      continue;
    }
    auto bell = duplicate(record.bell.get());
    if (!bell) {
      record.socket.reset();  // it comes back with its bell
    }
    writer_->set_bell(slot, std::move(bell));
    if (record.lives()) {
      writer_->demand(slot, 0);
    }
  }
}

/// A server that was the writer before it had opened the device would leave everybody waiting
/// meanwhile.
void succession::hear_ready(std::uint32_t slot) {
  if (is_server(view_.clients()[slot])) {
    clients_.at(slot).ready = true;
    appoint_ready_server();
  }
}

/// A server is appointed once what its predecessor held has been taken back: then it finds all that
/// is left to it. The broker's own writing ends first: there is never a second writer.
void succession::appoint_ready_server() {
  auto const slot = writer_ ? server_slot() : std::nullopt;
  if (!slot || !clients_.at(*slot).ready || dead_server_holds()) {
    return;
  }
  writer_->pump();
  writer_.reset();
  view_.header().serving_now.store(1);
  name_writer(*slot);
  spdlog::info("a server is ready and writes the ledger slot={} pool=\"{}\"", *slot,
               name_of(view_.shape()));
  announce_appointed(*slot);
}

/// Everything that the server in `slot` must know as writer: who can be woken, and who has died.
/// Once for each connection: a death that is told of twice may be that of the slot's next owner.
void succession::announce_appointed(std::uint32_t slot) {
  send_to_server({{"type", "appointed"}});
  for (std::uint32_t other = 0; other < max_clients; ++other) {
    auto& record = clients_.at(other);
    if (other == slot || !record.present) {
      continue;
    }
    if (record.process && record.bell) {
      send_to_server({{"type", "client_joined"}, {"slot", other}}, {record.bell.get()});
    } else if (record.reported) {
      send_to_server({{"type", "client_gone"}, {"slot", other}});
    }
  }
}

void succession::client_came(std::uint32_t slot, unique_fd writers_bell) {
  if (writer_) {
    writer_->set_bell(slot, std::move(writers_bell));
  } else {
    send_to_server({{"type", "client_joined"}, {"slot", slot}}, {clients_.at(slot).bell.get()});
  }
}

void succession::client_came_back(std::uint32_t slot, unique_fd writers_bell, bool ready) {
  if (!writer_ && view_.writer_slot() == slot) {
    announce_appointed(
        slot);  // an earlier broker has named it, and may have died before it said so
  } else {
    // A server that was appointed meanwhile has not been told of who had not come back by then.
    client_came(slot, std::move(writers_bell));
  }
  if (writer_) {
    writer_->pump();
  }
  if (ready) {
    hear_ready(slot);
  }
}

void succession::report_gone(std::uint32_t slot) {
  clients_.at(slot).reported = true;
  send_to_server({{"type", "client_gone"}, {"slot", slot}});
}

void succession::send_to_server(nlohmann::json const& body, std::vector<int> const& descriptors) {
  auto const slot = view_.writer_slot();
  if (slot >= max_clients || !clients_.at(slot).socket) {
    return;  // it will hear of it when it comes back, or its death makes us the writer
  }
  try {
    send_message(clients_.at(slot).socket.get(), body, descriptors);
  } catch (error const&) {
    clients_.at(slot).socket.reset();
  }
}

}  // namespace sluice::memhandover::detail
