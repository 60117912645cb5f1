#include "memhandover/ledger/client_entries.hpp"

#include <cstring>

#include "memhandover/base/error.hpp"
#include "memhandover/base/shared_text.hpp"

namespace sluice::memhandover {
namespace {

void set_text(char* to, std::size_t size, std::string const& text) {
  auto const fitting = cut_text(text, size - 1);
  std::memset(to, 0, size);
  std::memcpy(to, fitting.data(), fitting.size());
}

}  // namespace

process_identity process_of(client_entry const& entry) noexcept {
  return {static_cast<int>(entry.pid.load()), entry.start_ticks.load(), entry.pid_namespace.load()};
}

bool has_status(client_entry const& entry, client_status status) noexcept {
  return entry.status.load(std::memory_order_acquire) == static_cast<std::uint32_t>(status);
}

bool is_server(client_entry const& entry) noexcept {
  return entry.kind.load() == static_cast<std::uint32_t>(client_kind::server);
}

bool is_held(client_entry const& entry) noexcept {
  auto const until = entry.held_until_ns.load(std::memory_order_relaxed);
  return until == until_woken || until > static_cast<std::uint64_t>(monotonic_ns());
}

client_traits const* traits_of_live(client_entry const& entry) noexcept {
  return has_status(entry, client_status::live) ? traits_of(entry) : nullptr;
}

std::uint32_t empty_slot(ledger_view const& view) {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (has_status(view.clients()[slot], client_status::empty)) {
      return slot;
    }
  }
  throw error{error_kind::unavailable,
              "the pool has " + std::to_string(max_clients) + " clients, which is its limit"};
}

void write_client(ledger_view const& view, std::uint32_t slot, new_client const& who) {
  auto& entry = view.clients()[slot];
  entry.kind.store(static_cast<std::uint32_t>(who.kind));
  entry.pid.store(static_cast<std::uint32_t>(who.process.pid));
  entry.start_ticks.store(who.process.start_ticks);
  entry.pid_namespace.store(who.process.pid_namespace);
  entry.life_inode.store(who.life_inode);
  entry.held_until_ns.store(0);
  entry.in_use.store(0);
  entry.rank.store(static_cast<std::uint32_t>(who.standing.rank));
  entry.least_chunks.store(who.standing.least_chunks);
  set_text(entry.name, sizeof entry.name, who.name);
  set_text(entry.endpoint, sizeof entry.endpoint, who.endpoint);
  // A mailbox may have had an earlier owner; what it counted and said must not be shown as this one's.
  view.mailbox(slot).begin_anew();
  for (auto& note : view.chunk_notes(slot)) {
    note.store(0, std::memory_order_relaxed);
  }
  entry.status.store(static_cast<std::uint32_t>(client_status::live), std::memory_order_release);
}

}  // namespace sluice::memhandover
