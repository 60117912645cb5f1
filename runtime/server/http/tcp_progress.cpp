#include "runtime/server/http/tcp_progress.hpp"

// The C library's tcp_info ends before the field; both headers together do not compile.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace sluice::server {

std::optional<std::uint64_t> acknowledged_bytes(int socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof info;
  constexpr auto needed = offsetof(tcp_info, tcpi_bytes_acked) + sizeof info.tcpi_bytes_acked;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || size < needed) {
    return std::nullopt;
  }
  return info.tcpi_bytes_acked;
}

}  // namespace sluice::server
