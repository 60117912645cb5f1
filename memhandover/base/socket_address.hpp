/// Where a Unix socket of the file system is. Pure.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <optional>
#include <string>

namespace sluice::memhandover {

/// Nothing: the path is too long for one.
[[nodiscard]] inline std::optional<sockaddr_un> socket_address(std::string const& path) noexcept {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return std::nullopt;
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

}  // namespace sluice::memhandover
