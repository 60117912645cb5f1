/// The server of a store in a process of its own, for as long as this lives.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sluice::nccl_shim::testing {

class store_server {
 public:
  /// Starts it by a command in front of its own, and waits until it listens. Throws if it does not.
  explicit store_server(std::vector<std::string> const& command_in_front = {});
  store_server(store_server const&) = delete;
  store_server& operator=(store_server const&) = delete;
  ~store_server();

  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
  /// Sends it a signal; where that ends it, waits until it has ended.
  void kill(int signal);

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  std::uint16_t port_ = 0;
};

}  // namespace sluice::nccl_shim::testing
