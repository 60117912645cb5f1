/// The places of clients in a ledger, as the broker writes them.
#pragma once

#include <cstdint>
#include <string>

#include "memhandover/base/processes.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {

/// Who takes a place.
struct new_client {
  client_kind kind = client_kind::training;
  process_identity process{};
  std::uint64_t life_inode = 0;  ///< of its life pipe
  std::string name{};
  std::string endpoint{};
  job_standing standing{};
};

[[nodiscard]] process_identity process_of(client_entry const& entry) noexcept;

[[nodiscard]] bool has_status(client_entry const& entry, client_status status) noexcept;
[[nodiscard]] bool is_server(client_entry const& entry) noexcept;
/// An operator wants it parked at present.
[[nodiscard]] bool is_held(client_entry const& entry) noexcept;
/// What may be done by the live client that has the place; null if none has, or its kind is damaged. Whoever asks for
/// the kind first may read that of a former owner.
[[nodiscard]] client_traits const* traits_of_live(client_entry const& entry) noexcept;

/// A slot that nobody has. Throws `unavailable` if there is none.
[[nodiscard]] std::uint32_t empty_slot(ledger_view const& view);

/// Writes a client into an empty slot, which is then live, and has said nothing yet.
void write_client(ledger_view const& view, std::uint32_t slot, new_client const& who);

}  // namespace sluice::memhandover
