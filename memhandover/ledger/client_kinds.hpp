/// The kinds of client that a pool knows, and what each may do, as data: who decides by kind asks here.
///
///   auto const* const kind = traits_of(view.clients()[slot]);  // null: a damaged entry
///   if (kind != nullptr && kind->is_tenant) {
///     // … what it asks for becomes `kind->owns` …
///   }
///
/// Thread-safety: any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "memhandover/ledger/layout.hpp"

namespace sluice::memhandover {

/// When the server demands chunks from clients of a kind, as it acquires memory.
enum class turn_in_handovers : std::uint8_t {
  first,           ///< as soon as what is free is too little
  last_if_wanted,  ///< after those, only by a server that has said so, and not for its reserve
  never,
};

struct client_traits {
  client_kind kind;
  owner owns;        ///< the owner in the words of its chunks
  char const* name;  ///< when it joins, in status and logs
  /// It asks for chunks in its mailbox, releases them there, and answers demands. The server is none: it
  /// takes.
  bool is_tenant;
  /// Demands may wait for the end of its commits, so that a request of one may go before them.
  bool commits;
  turn_in_handovers turn;
  /// Counts the bytes that it has been granted; null where nothing is granted.
  std::atomic<std::uint64_t> ledger_header::*granted_bytes;
};

inline constexpr std::array<client_traits, 3> client_kinds{{
    {client_kind::training, owner::training, "training", true, true, turn_in_handovers::first,
     &ledger_header::bytes_to_training},
    {client_kind::server, owner::serving, "server", false, false, turn_in_handovers::never,
     nullptr},
    {client_kind::engine, owner::engine, "engine", true, false, turn_in_handovers::last_if_wanted,
     &ledger_header::bytes_to_engines},
}};

/// Null for a word that is no kind.
[[nodiscard]] client_traits const* traits_of(client_entry const& entry) noexcept;
[[nodiscard]] client_traits const& traits_of(client_kind kind) noexcept;
/// The kind of that name. Throws `invalid_argument` naming those that there are.
[[nodiscard]] client_traits const& kind_named(std::string_view name);

/// As in status: "unknown" for what a damaged word says.
[[nodiscard]] char const* name_of(owner who) noexcept;
/// As in status: "unknown" for what a damaged word says.
[[nodiscard]] char const* name_of_kind(std::uint32_t word) noexcept;

}  // namespace sluice::memhandover
