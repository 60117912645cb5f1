/// Tells `sluice status` what the server says of itself, whatever its endpoint asks of strangers: over a socket in the runtime folder,
/// which only the server's user can open.
///
///   status_socket const socket{memhandover::status_socket_of("", 0),
///                              [&] { return service.status(); }};
///
/// A client connects, and reads JSON to its end. Of several servers the last one to come has the socket; what a cleaner removes
/// is put back within a second.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

class status_socket {
 public:
  using source = std::function<nlohmann::json()>;  ///< may throw

  /// Where there can be no socket, `sluice status` asks the endpoint; the log says why.
  status_socket(std::string path, source status);
  ~status_socket();
  status_socket(status_socket const&) = delete;
  status_socket& operator=(status_socket const&) = delete;
  status_socket(status_socket&&) = delete;
  status_socket& operator=(status_socket&&) = delete;

 private:
  void listen();
  void serve();
  void answer() const;
  /// Of what lies at the path; 0: nothing.
  [[nodiscard]] std::uint64_t inode() const;

  std::string const path_;
  source const status_;
  memhandover::unique_fd listening_, end_;
  std::uint64_t own_inode_ = 0;
  std::thread thread_;
};

}  // namespace sluice::server
