/// What the other side of a TCP connection has of what was sent there.
///
///   auto const before = acknowledged_bytes(socket);
///   // … something is sent, and the connection ends …
///   acknowledged_bytes(socket) == before;   // nothing of it had come when the other side ended it
///
/// An end in order (FIN) acknowledges all that has come until then (RFC 9293 section 3.10.7.4), so that the number says it exactly;
/// a reset does not. Source: tcp_info in tcp(7).
#pragma once

#include <cstdint>
#include <optional>

namespace sluice::server {

/// Nothing: it is no TCP connection, or the kernel does not say.
[[nodiscard]] std::optional<std::uint64_t> acknowledged_bytes(int socket) noexcept;

}  // namespace sluice::server
