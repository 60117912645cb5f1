/// Takes connections in for gRPC, which has no bound of its own for them, and stops to listen when the process cannot open another file.
/// Inside of grpc_endpoint.hpp.
///
/// gRPC does not say when a connection has ended: where they seem to be too many, those whose descriptor is another's by now, or
/// nobody's, are found. One more than there may be is closed at once.
///
/// Threads: all on a strand of the io_context that it is made with, but for `stop`, which waits for that.
#pragma once

#include <sys/types.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sluice::server {

class grpc_listener {
 public:
  /// Gets the descriptor of each connection, which is its own then.
  using receiver = std::function<void(int connection)>;

  /// Listens from here on; throws as `listen` does.
  grpc_listener(boost::asio::io_context& io, std::string const& host, std::uint16_t port,
                std::size_t most);
  void start(receiver give);
  /// No connection is given away afterwards. To be called while the io_context runs.
  void stop();

  [[nodiscard]] boost::asio::ip::tcp::endpoint const& local() const noexcept { return local_; }

 private:
  struct taken_in {
    int descriptor;
    ino_t socket;
  };
  void accept();
  void on_accepted(boost::system::error_code failure, boost::asio::ip::tcp::socket connection);
  void take_in(boost::asio::ip::tcp::socket connection);
  [[nodiscard]] bool has_room();

  boost::asio::io_context& io_;
  boost::asio::ip::tcp::acceptor acceptor_;  // on a strand of its own
  boost::asio::steady_timer pause_;          // on the acceptor's strand
  boost::asio::ip::tcp::endpoint const local_;
  std::size_t const most_;
  receiver give_;
  std::vector<taken_in> open_;  // some of them have ended
};

}  // namespace sluice::server
