/// What the server's user asks it and has it do, whatever its endpoint asks of strangers: over a socket in the runtime folder, which
/// only that user can open.
///
///   status_socket const socket{memhandover::status_socket_of("", 0),
///                              {{"status", [&] { return service.status(); }},
///                               {"reload", [&] { return control.reload(); }}}};
///
/// A client connects, sends the name of what it wants and a newline, and reads JSON to its end: what came of it, or {"error": why,
/// "kind": its error_kind}. Each is answered on a thread of its own. Of several servers the last one to come has the socket; what a cleaner removes
/// is put back within a second.
#pragma once

#include <boost/asio/thread_pool.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

class status_socket {
 public:
  using source = std::function<nlohmann::json()>;  ///< may throw
  using sources = std::map<std::string, source>;   ///< by name

  /// Where there can be no socket, `sluice status` asks the endpoint; the log says why.
  status_socket(std::string path, sources answers);
  ~status_socket();
  status_socket(status_socket const&) = delete;
  status_socket& operator=(status_socket const&) = delete;
  status_socket(status_socket&&) = delete;
  status_socket& operator=(status_socket&&) = delete;

 private:
  void listen();
  void serve();
  void accept();
  void answer(int client) const;
  /// Of what lies at the path; 0: nothing.
  [[nodiscard]] std::uint64_t inode() const;
  static constexpr std::size_t most_askers = 4;

  std::string const path_;
  sources const answers_;
  memhandover::unique_fd listening_, end_;
  std::uint64_t own_inode_ = 0;
  std::thread thread_;
  boost::asio::thread_pool askers_{most_askers};
};

}  // namespace sluice::server
